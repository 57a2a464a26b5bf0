// Keys, and the page that lists them.

import { html, useEffect, useLayoutEffect, useRef } from "./vendor/htm-preact.js";

const LIST = [
  ["j, k", "next, previous row of the list; in a trajectory: the next, previous one of the list"],
  ["Enter", "open the row"],
  ["u", "back to the list"],
  ["g", "all samples of the prompt side by side"],
  ["o", "next overlay of the tokens"],
  ["Left, Right", "previous, next token of the overlay"],
  ["e", "save this trajectory as one HTML file"],
  ["c, l, d", "compare two steps or runs; the list; the dashboard"],
  ["/", "go to the search for text"],
  ["t", "theme"],
  ["?", "this list"],
];

// Calls `act` when the key is pressed outside of a field: what it does is that of what is shown.
export function useKey(key, act) {
  const latest = useRef();
  latest.current = act;
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.key !== key || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest?.("input, select, textarea, dialog[open]")) return;
      event.preventDefault();
      latest.current();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [key]);
}

export function Help({ close }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="keys">
    <h2 id="keys">Keys</h2>
    <table><tbody>${LIST.map(([key, what]) => html`<tr><th scope="row"><kbd>${key}</kbd></th><td>${what}</td></tr>`)}</tbody></table>
    <button onClick=${() => dialog.current.close()}>Close</button>
  </dialog>`;
}
