// What the page shows, kept in the hash of its address, so that a link opens the same view.

import { useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

// Of a view, beside the run, kind and step that all views share. The list's filters stay while a row is open.
export const FILTERS = [
  "source", "status", "group", "question", "text", "min_reward", "max_reward", "min_searches", "max_searches",
  "min_tokens", "max_tokens", "component", "min_component", "max_component",
];
export const LATEST = "latest";
export const ALL = "all";

export function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function linkTo(changes) {
  const all = { ...read(), ...changes };
  const kept = Object.entries(all).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return "#" + new URLSearchParams(kept);
}

// A new entry of the browser's history; `replace` for what nobody wants to go back to, such as a letter typed.
export function go(changes, replace = false) {
  const link = linkTo(changes);
  if (replace) {
    history.replaceState(null, "", link);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = link;
  }
}

export function useHash() {
  const [state, set] = useState(read());
  useLayoutEffect(() => {
    const changed = () => set(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return state;
}

// The runs are shown that were shown before, when another one comes: names that end alike get longer, and it may be first.
export function useNames(runs) {
  const known = useRef();
  useLayoutEffect(() => {
    const before = known.current;
    known.current = runs;
    if (!before || String(before.map((one) => one.name)) === String(runs.map((one) => one.name))) return;
    const now = (name) => {
      const path = before.find((one) => one.name === name)?.path;
      return runs.find((one) => one.path === path)?.name ?? name;
    };
    const { run = before[0].name, other_run, with: others } = read();
    go({ run: now(run), other_run: now(other_run), with: others && JSON.stringify(namesIn(others).map(now)) }, true);
  }, [runs]);
}

// The names in a JSON list; none in a link that somebody cut.
export function namesIn(text = "[]") {
  try {
    const names = JSON.parse(text);
    return Array.isArray(names) ? names : [];
  } catch {
    return [];
  }
}

// The files of a kind, and the step that is meant: a number, or undefined for all.
export function filesOf(run, kind) {
  return run ? run.files.filter((file) => file.kind === kind) : [];
}

export function kindOf(run, state) {
  const kinds = [...new Set(run.files.map((file) => file.kind))];
  return kinds.includes(state.kind) ? state.kind : kinds[0];
}

export function stepOf(run, state) {
  const steps = filesOf(run, kindOf(run, state)).map((file) => file.step);
  if (state.step === ALL) return undefined;
  const asked = Number(state.step);
  return state.step !== undefined && steps.includes(asked) ? asked : steps.at(-1);
}

// The query of the list: filters, order and page.
export function listQuery(run, state) {
  const filters = Object.fromEntries(FILTERS.map((name) => [name, state[name]]));
  const order = { sort: state.sort, descending: state.descending, offset: state.offset };
  if (!order.sort && stepOf(run, state) === undefined) order.descending = "true"; // of all steps the newest first
  return { run: run.name, kind: kindOf(run, state), step: stepOf(run, state), ...filters, ...order };
}
