// The text of a trajectory: parts by kind, and over its tokens one stored value.

import { html, useEffect, useState } from "./htm-preact.js";
import { NAMES, Runs, number } from "./format.js";
import { useKey } from "./keys.js";

const NO_TEXT = "\u25ab"; // of a token whose bytes are the start of a character
const STEPS = 6; // shades of a value

export const TEXT = "text";
export const MASK = "loss_mask";

export function overlays(tokens) {
  return tokens ? [TEXT, MASK, ...Object.keys(tokens.values)] : [TEXT];
}

export function Transcript({ segments, tokens, overlay = TEXT }) {
  const shown = overlays(tokens).includes(overlay) ? overlay : TEXT;
  const [at, choose] = useState(null);
  const last = (tokens?.ids.length ?? 0) - 1;
  const move = (by) => shown !== TEXT && choose(at === null ? 0 : Math.max(0, Math.min(last, at + by)));
  useKey("ArrowRight", () => move(1));
  useKey("ArrowLeft", () => move(-1));
  useEffect(() => {
    if (at !== null) document.querySelector(`[data-token="${at}"]`)?.scrollIntoView({ block: "nearest" });
  }, [at]);
  const pick = (event) => {
    const token = event.target.closest?.("[data-token]");
    if (token) choose(Number(token.dataset.token));
  };
  const shade = shader(tokens, shown);
  return html`<div class="transcript" onMouseOver=${pick} onClick=${pick}>
    ${shown !== TEXT && html`<${TokenLine} tokens=${tokens} at=${at} overlay=${shown} />`}
    ${segments.map((segment) => (shown === TEXT || segment.exact
      ? segment.parts.map((part) => html`<${Part} part=${part} source=${segment.source} tokens=${shown === TEXT ? null : tokens} shade=${shade} at=${at} />`)
      : html`<${Inexact} segment=${segment} tokens=${tokens} shade=${shade} at=${at} />`))}
  </div>`;
}

function Part({ part, source, tokens, shade, at }) {
  const kind = source === "prompt" ? "prompt" : part.kind;
  return html`<section class=${`part ${kind}`} data-kind=${kind} aria-label=${NAMES[kind]}>
    <span class="kind">${NAMES[kind]}</span>
    <div class="body">${tokens
      ? html`<${TokenRow} tokens=${tokens} from=${part.tokens[0]} to=${part.tokens[1]} shade=${shade} at=${at} />`
      : html`<${Runs} runs=${part.runs} />`}</div>
  </section>`;
}

// Tokens whose texts are not the stored text (no tokenizer, or another one) cannot be told apart by kind.
function Inexact({ segment, tokens, shade, at }) {
  return html`<section class="part text" data-kind="tokens" aria-label=${segment.source}>
    <span class="kind">${segment.source}</span>
    <p class="note">${tokens.texts ? "The tokenizer gives other text than was stored; tokens are not split by kind." : "No tokenizer: ids."}</p>
    <div class="body"><${TokenRow} tokens=${tokens} from=${segment.span[0]} to=${segment.span[1]} shade=${shade} at=${at} /></div>
  </section>`;
}

function TokenRow({ tokens, from, to, shade, at }) {
  const all = [];
  for (let place = from; place < to; place += 1) {
    const text = tokens.texts ? tokens.texts[place] || NO_TEXT : `${tokens.ids[place]} `;
    all.push(html`<span key=${place} class=${`token ${shade(place)}${place === at ? " at" : ""}`} data-token=${place}
      data-id=${tokens.ids[place]} data-mask=${tokens.mask[place] ? 1 : 0}>${text}</span>`);
  }
  return all;
}

function TokenLine({ tokens, at, overlay }) {
  const legend = overlay === MASK ? "Trained tokens are shaded." : `Darker is further from 0; the darkest is ${number(largest(tokens.values[overlay]))} and beyond.`;
  const about = at === null
    ? "Point at a token, or press Left and Right."
    : [`token ${at}`, `id ${tokens.ids[at]}`, tokens.texts && JSON.stringify(tokens.texts[at]), tokens.mask[at] ? "trained" : "not trained",
        ...Object.entries(tokens.values).map(([name, values]) => `${name} ${exact(values[at])}`)].filter(Boolean).join(", ");
  return html`<p class="tokenline" role="status"><span>${legend}</span> <code>${about}</code></p>`;
}

// The class of a token: trained or not, or how far its value is from 0 and to which side.
function shader(tokens, overlay) {
  if (overlay === TEXT || !tokens) return () => "";
  if (overlay === MASK) return (place) => (tokens.mask[place] ? "trained" : "untrained");
  const values = tokens.values[overlay];
  const most = largest(values) || 1;
  return (place) => {
    const value = values[place];
    if (typeof value !== "number") return "odd"; // NaN and infinities
    const step = Math.min(STEPS, Math.round((STEPS * Math.abs(value)) / most));
    return step ? `${value < 0 ? "minus" : "plus"}${step}` : "";
  };
}

// The 98th percentile of the sizes that are not 0: a single outlier would leave all others pale.
function largest(values) {
  const sizes = values.filter((value) => typeof value === "number" && value !== 0).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] : 0;
}

function exact(value) {
  return typeof value === "number" ? value.toFixed(4) : String(value);
}
