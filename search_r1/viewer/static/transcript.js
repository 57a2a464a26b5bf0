// The text of a trajectory: parts by kind, and over its tokens one stored value.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { NAMES, Runs, precise } from "./format.js";
import { useKey } from "./keys.js";
import { Legend, TEXT, VERSION, label, overlays, scale, valueOf } from "./overlay.js";

const NO_TEXT = "\u25ab"; // of a token whose bytes are the start of a character

export function Transcript({ segments, tokens, overlay = TEXT }) {
  const shown = overlays(tokens).includes(overlay) ? overlay : TEXT;
  const [at, choose] = useState(null);
  const box = useRef();
  const last = (tokens?.ids.length ?? 0) - 1;
  const move = (by) => shown !== TEXT && choose(at === null ? 0 : visible(box.current, at + by, by, last) ?? at);
  useKey("ArrowRight", () => move(1));
  useKey("ArrowLeft", () => move(-1));
  useLayoutEffect(() => { // an effect after the next frame would take the focus back from a token that was reached since
    const token = at === null ? null : box.current.querySelector(`[data-token="${at}"]`);
    token?.scrollIntoView({ block: "nearest" });
    if (box.current.contains(document.activeElement)) token?.focus(); // Tab came here, and then the arrow keys
  }, [at]);
  // Of the mouse only its own moves: when an arrow key scrolls the text, other tokens come over a pointer that rests.
  const pick = (event) => {
    const token = event.target.closest?.("[data-token]");
    if (token) choose(Number(token.dataset.token));
  };
  const { shade, swatches } = scale(tokens, shown);
  const value = (place) => valueOf(tokens, shown, place);
  const row = { tokens: shown === TEXT ? null : tokens, shade, value, at };
  return html`<div class="transcript" ref=${box} onMouseMove=${pick} onClick=${pick} onFocusCapture=${pick}>
    ${shown !== TEXT && html`<${TokenLine} tokens=${tokens} at=${at} overlay=${shown} swatches=${swatches} />`}
    ${sequences(segments).map((sequence, number, all) => html`
      ${all.length > 1 && html`<h4>Sequence ${number + 1} of ${all.length}</h4>`}
      ${sequence.map((segment) => (segment.source === "context"
        ? html`<${Context} segment=${segment}>${body(segment, shown, row)}<//>`
        : body(segment, shown, row)))}`)}
  </div>`;
}

// A context begins each sequence but the first.
function sequences(segments) {
  const all = [[]];
  for (const segment of segments) {
    if (segment.source === "context") all.push([]);
    all.at(-1).push(segment);
  }
  return all;
}

function body(segment, shown, row) {
  return [parts(segment, shown, row), segment.reward != null && html`<p class="note">Reward of this turn: ${precise(segment.reward)}</p>`];
}

function parts(segment, shown, row) {
  return shown === TEXT || segment.exact
    ? segment.parts.map((part) => html`<${Part} part=${part} source=${segment.source} row=${row} />`)
    : html`<${Inexact} segment=${segment} row=${row} />`;
}

// The first token from `place` on, in the direction of `by`, that is in no folded context.
function visible(box, place, by, last) {
  const fold = box.querySelector(`[data-token="${place}"]`)?.closest("details:not([open])");
  if (fold) return visible(box, by > 0 ? Number(fold.dataset.end) : Number(fold.dataset.first) - 1, by, last);
  return place >= 0 && place <= last ? place : null;
}

// What the policy saw before the next turn, most of it a second time.
function Context({ segment, children }) {
  const [first, end] = segment.span;
  return html`<details class="context note" data-first=${first} data-end=${end}>
    <summary>Context, ${end - first} tokens</summary>${children}</details>`;
}

function Part({ part, source, row }) {
  const kind = source === "prompt" || source === "context" ? source : part.kind;
  return html`<section class=${`part ${kind}`} data-kind=${kind} aria-label=${NAMES[kind]}>
    <span class="kind">${NAMES[kind]}</span>
    <div class="body">${row.tokens
      ? html`<${TokenRow} ...${row} from=${part.tokens[0]} to=${part.tokens[1]} />`
      : html`<${Runs} runs=${part.runs} />`}</div>
  </section>`;
}

// Tokens whose texts are not the stored text (no tokenizer, or another one) cannot be told apart by kind.
function Inexact({ segment, row }) {
  return html`<section class="part text" data-kind="tokens" aria-label=${segment.source}>
    <span class="kind">${segment.source}</span>
    <p class="note">${row.tokens.texts ? "The tokenizer gives other text than was stored; tokens are not split by kind." : "No tokenizer: ids."}</p>
    <div class="body"><${TokenRow} ...${row} from=${segment.span[0]} to=${segment.span[1]} /></div>
  </section>`;
}

// One token is in the order of the Tab key: the one that was chosen, at first the first.
function TokenRow({ tokens, from, to, shade, value, at }) {
  const all = [];
  for (let place = from; place < to; place += 1) {
    const text = tokens.texts ? tokens.texts[place] || NO_TEXT : `${tokens.ids[place]} `;
    all.push(html`<span key=${place} class=${`token ${shade(place)}${place === at ? " at" : ""}`} data-token=${place}
      tabindex=${place === (at ?? 0) ? 0 : -1} data-value=${value(place) ?? ""} data-id=${tokens.ids[place]} data-mask=${tokens.mask[place] ? 1 : 0}>${text}</span>`);
  }
  return all;
}

function TokenLine({ tokens, at, overlay, swatches }) {
  const about = at === null
    ? "Point at a token, or press Left and Right."
    : [`token ${at}`, `id ${tokens.ids[at]}`, tokens.texts && JSON.stringify(tokens.texts[at]), tokens.mask[at] ? "trained" : "not trained",
        ...Object.entries(tokens.values).map(([name, values]) => values[at] !== null && `${label(name)} ${name === VERSION ? values[at] : precise(values[at])}`)].filter(Boolean).join(", ");
  return html`<div class="tokenline"><${Legend} overlay=${overlay} swatches=${swatches} /> <code role="status">${about}</code></div>`;
}
