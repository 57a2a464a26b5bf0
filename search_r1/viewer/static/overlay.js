// The colour of a token under an overlay, and the legend that says which number is which colour.

import { html } from "./vendor/htm-preact.js";
import { precise } from "./format.js";

export const TEXT = "text";
export const MASK = "loss_mask";
export const VERSION = "weight_version";
const STEPS = 6; // shades to each side of 0
const NONE = "none"; // the class of a token without a number

const LABELS = {
  [TEXT]: "text", [MASK]: "loss mask", log_probs: "log-prob (sampler)", old_log_probs: "log-prob (trainer)",
  gap: "gap (trainer - sampler)", kl: "KL to the anchor", advantages: "advantage", [VERSION]: "weight version",
};

export function label(name) {
  return LABELS[name] ?? name;
}

export function overlays(tokens) {
  return tokens ? [TEXT, MASK, ...Object.keys(tokens.values)] : [TEXT];
}

export function valueOf(tokens, overlay, place) {
  if (!tokens || overlay === TEXT) return null;
  return overlay === MASK ? Number(tokens.mask[place]) : tokens.values[overlay][place];
}

// `shade(place)` is the class of a token; `swatches` are [class, text] from the lowest to the highest.
export function scale(tokens, overlay) {
  if (!tokens || overlay === TEXT) return { shade: () => "", swatches: [] };
  if (overlay === MASK) {
    return {
      shade: (place) => (tokens.mask[place] ? "trained" : "untrained"),
      swatches: [["untrained", "not trained"], ["trained", "trained"]],
    };
  }
  const values = tokens.values[overlay];
  const numbers = values.filter((value) => typeof value === "number");
  const classes = overlay === VERSION ? ranked(numbers) : fromZero(numbers);
  return {
    shade: (place) => {
      const value = values[place];
      if (value === null) return NONE;
      return typeof value === "number" ? classes.of(value) : "odd"; // NaN and infinities come as texts
    },
    swatches: classes.swatches,
  };
}

// How far a value is from 0, and to which side.
function fromZero(numbers) {
  const most = largest(numbers);
  const of = (value) => {
    const step = most ? Math.min(STEPS, Math.round((STEPS * Math.abs(value)) / most)) : 0;
    return step ? `${value < 0 ? "minus" : "plus"}${step}` : "";
  };
  const sides = [-1, 1].filter((sign) => numbers.some((value) => value * sign > 0));
  const steps = Array.from({ length: STEPS }, (_, place) => place + 1);
  const below = sides.includes(-1) ? steps.map((step) => [`minus${step}`, step === STEPS ? `${precise(-most)} and below` : ""]).reverse() : [];
  const above = sides.includes(1) ? steps.map((step) => [`plus${step}`, step === STEPS ? `${precise(most)} and above` : ""]) : [];
  return { of, swatches: [...below, ["", "0"], ...above] };
}

// Each of a few whole numbers by its place among them, the lowest the palest.
function ranked(numbers) {
  const known = [...new Set(numbers)].sort((a, b) => a - b);
  const of = (value) => `plus${1 + Math.round(((STEPS - 1) * known.indexOf(value)) / Math.max(1, known.length - 1))}`;
  return { of, swatches: known.map((value) => [of(value), String(value)]) };
}

// The 98th percentile of the sizes that are not 0: a single outlier would leave all others pale.
function largest(numbers) {
  const sizes = numbers.filter((value) => value !== 0).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] : 0;
}

export function Legend({ overlay, swatches }) {
  return html`<span class="legend" role="group" aria-label="Legend"><strong>${label(overlay)}</strong>
    ${swatches.map(([shade, text]) => html`<span class=${`swatch ${shade}`}>${text || "\u00a0"}</span>`)}</span>`;
}
