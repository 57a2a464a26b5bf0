// Numbers and texts for people. Everything becomes a text node: nothing that was stored is ever read as HTML.

import { html } from "./vendor/htm-preact.js";

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value); // NaN and infinities come as texts
  return Number.isInteger(value) ? String(value) : value.toFixed(digits);
}

// A number of a token: a KL of 1e-6 is not 0.
export function precise(value) {
  if (typeof value !== "number") return String(value);
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : value.toFixed(4);
}

export function signed(value) {
  return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value);
}

export function rewardClass(value) {
  if (typeof value !== "number") return "reward none";
  return value > 0 ? "reward good" : "reward bad";
}

export function components(values) {
  return Object.entries(values ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

// Gold answers out of the stored JSON, which may be cut.
export function gold(text) {
  try {
    const truth = JSON.parse(text);
    return [truth?.target ?? truth].flat().join(" | ");
  } catch {
    return text ?? "";
  }
}

export function Runs({ runs }) {
  return runs.map(([text, isGold]) => (isGold ? html`<mark>${text}</mark>` : text));
}

export function Problem({ error }) {
  return html`<p class="problem" role="alert">${error.message}</p>`;
}

export const NAMES = {
  think: "think", search: "search", information: "information", answer: "answer", feedback: "feedback",
  text: "text", prompt: "prompt",
};
