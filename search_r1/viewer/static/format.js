// Numbers and texts for people. Everything becomes a text node: nothing that was stored is ever read as HTML.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

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

// A text of any length: what is longer than a few lines is cut, with a button for the rest.
export function Clipped({ children }) {
  const text = useRef();
  const [cut, setCut] = useState(false);
  const [open, setOpen] = useState(false);
  const isCut = (element) => element.scrollHeight > element.clientHeight + 1;
  useObserved(text, (element) => element.classList.contains("clipped") && setCut(isCut(element)), [children, open]);
  return html`<div class=${open ? "clip" : "clip clipped"} ref=${text}>${children}</div>${cut && html`<button type="button"
    class="more" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "less" : "more"}</button>`}`;
}

// A table that may be wider than the window. That it scrolls is said, as a touch screen shows no bar.
export function Scroll({ label, children }) {
  const box = useRef();
  const [wide, setWide] = useState(false);
  useObserved(box, (element) => setWide(element.scrollWidth > element.clientWidth + 1), [children]);
  return html`${wide && html`<p class="note sideways">The table scrolls sideways \u2192</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label=${label} ref=${box}>${children}</div>`;
}

// Looks at an element after each change of what it depends on, and of its size.
function useObserved(element, look, changes) {
  useEffect(() => {
    const watch = new ResizeObserver(() => look(element.current));
    watch.observe(element.current);
    look(element.current);
    return () => watch.disconnect();
  }, changes);
}

export function Runs({ runs }) {
  return runs.map(([text, isGold]) => (isGold ? html`<mark>${text}</mark>` : text));
}

export function Problem({ error }) {
  return html`<p class="problem" role="alert">${error.message}</p>`;
}

export const NAMES = {
  think: "think", search: "search", information: "information", answer: "answer", feedback: "feedback", summary: "summary",
  call: "call", result: "result", text: "text", prompt: "prompt", context: "context",
};
