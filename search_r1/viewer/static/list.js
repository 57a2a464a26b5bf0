// The list: filters, a table with an order, pages.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { useData } from "./api.js";
import { Clipped, Problem, Scroll, components, number, rewardClass } from "./format.js";
import { useKey } from "./keys.js";
import { FILTERS, go, kindOf, linkTo, listQuery, stepOf } from "./state.js";

const PAGE = 50;
const COLUMNS = [
  ["reward", "Reward"], [null, "Components"], ["question", "Question"], [null, "Gold"], [null, "Answer"],
  ["data_source", "Source"], ["status", "Status"], ["searches", "Searches"], ["turns", "Turns"], ["tokens", "Tokens"],
  ["step", "Step"],
];
const QUICK = [
  ["Reward 0", { min_reward: "0", max_reward: "0" }],
  ["Reward above 0", { min_reward: "0.000001", max_reward: undefined }],
  ["Failed", { status: "failed" }],
  ["No search", { max_searches: "0", min_searches: undefined }],
];

export function List({ run, state }) {
  const query = listQuery(run, state);
  const { data, error, waiting } = useData("rows", { ...query, limit: PAGE }, run.version);
  const [chosen, choose] = useState(0);
  const rows = data?.rows ?? [];
  useLayoutEffect(() => choose(0), [JSON.stringify(query)]);
  const move = (by) => choose(Math.max(0, Math.min(rows.length - 1, chosen + by)));
  const open = (place) => go(opened(run, state, rows[place], place));
  for (const [keys, by] of [[["j", "ArrowDown"], 1], [["k", "ArrowUp"], -1]]) for (const key of keys) useKey(key, () => move(by));
  useKey("Enter", () => rows[chosen] && open(chosen));
  return html`
    <${Filters} run=${run} state=${state} />
    ${error && html`<${Problem} error=${error} />`}
    <${Pager} state=${state} total=${data?.total} waiting=${waiting} />
    <${Table} run=${run} state=${state} rows=${rows} chosen=${chosen} />`;
}

function opened(run, state, row, place) {
  return { view: "trajectory", run: run.name, file: row.file, row: row.row, at: Number(state.offset ?? 0) + place };
}

// `name`: what the first row's number is called in the address.
export function Pager({ state, total, waiting, page = PAGE, name = "offset" }) {
  const offset = Number(state[name] ?? 0);
  if (total === undefined) return html`<p class="pager" role="status">Searching</p>`;
  const last = Math.min(offset + page, total);
  const rows = offset < total ? `${offset + 1} to ${last} of ${total}` : `None on this page of ${total}`; // of what got shorter
  const to = (place) => () => go({ [name]: place || undefined });
  return html`<p class="pager">
    <span role="status" class="total">${total ? rows : "Nothing fits the filters."}${waiting ? " ..." : ""}</span>
    <button disabled=${!offset} onClick=${to(Math.max(0, offset - page))}>Previous page</button>
    <button disabled=${last >= total} onClick=${to(offset + page)}>Next page</button>
  </p>`;
}

function Table({ run, state, rows, chosen }) {
  const sorted = (name) => (state.sort === name ? (state.descending ? "descending" : "ascending") : undefined);
  const sort = (name) => go({ sort: name, descending: state.sort === name && !state.descending ? "true" : undefined, offset: undefined });
  const arrow = (name) => ({ ascending: " \u25b2", descending: " \u25bc" })[sorted(name)] ?? html`<span class="sortable" aria-hidden="true"> \u2195</span>`;
  return html`<${Scroll} label="Trajectories"><table class="rows">
    <thead><tr>${COLUMNS.map(([name, title]) => html`<th scope="col" aria-sort=${name && sorted(name)}>
      ${name ? html`<button onClick=${() => sort(name)}>${title}${arrow(name)}</button>` : title}</th>`)}
    </tr></thead>
    <tbody>${rows.map((row, place) => html`<${Row} key=${`${row.file} ${row.row}`} row=${row} chosen=${place === chosen}
      link=${linkTo(opened(run, state, row, place))} />`)}</tbody>
  </table><//>`;
}

function Row({ row, chosen, link }) {
  const element = useRef();
  useEffect(() => chosen && element.current.scrollIntoView({ block: "nearest" }), [chosen]);
  return html`<tr ref=${element} class=${chosen ? "chosen" : ""} onClick=${(event) => event.target.closest("a, button") || (location.hash = link)}>
    <td class=${rewardClass(row.reward)}>${number(row.reward)}</td>
    <td class="small">${components(row.reward_components)}</td>
    <td class="question"><${Clipped}><a href=${link}>${row.question ?? row.group_id}</a><//></td>
    <td><${Clipped}>${row.gold.join(" | ")}<//></td>
    <td><${Clipped}>${row.failure ?? row.answer ?? `... ${row.ending}`}<//></td>
    <td class="small">${row.data_source}</td><td class="small">${row.status}</td>
    <td>${row.num_searches}</td><td>${row.num_turns}</td><td>${row.num_tokens}</td><td>${row.step}</td>
  </tr>`;
}

function Filters({ run, state }) {
  const found = useData("facets", { run: run.name, kind: kindOf(run, state), step: stepOf(run, state) }, run.version).data ?? {};
  const search = useRef();
  const narrow = useNarrow();
  const [folded, fold] = useState(true);
  useKey("/", () => {
    search.current.closest("details").open = true; // which tells onToggle
    search.current.focus(); // at once: the next key is typed into it
  });
  const set = (name) => (event) => go({ [name]: event.target.value, offset: undefined }, true);
  const order = state.sort === "component" ? { sort: undefined, descending: undefined } : {}; // of what is cleared, too
  const clear = () => go({ ...Object.fromEntries(FILTERS.map((name) => [name, undefined])), ...order, offset: undefined });
  const numSet = FILTERS.filter((name) => state[name]).length;
  const range = (label, name, step) => html`<fieldset><legend>${label}</legend>
    ${["min", "max"].map((end) => html`<input name=${`${end}_${name}`} type="number" step=${step} aria-label=${`${label}, ${end}`}
      placeholder=${end} value=${state[`${end}_${name}`] ?? ""} onChange=${set(`${end}_${name}`)} />`)}</fieldset>`;
  return html`<form class="filters" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    <div class="quick">${QUICK.map(([label, changes]) => html`<button type="button"
      onClick=${() => go({ ...changes, offset: undefined })}>${label}</button>`)}
      ${numSet > 0 && html`<button type="button" onClick=${clear}>Clear filters</button>`}</div>
    <details class="fold" open=${!narrow || !folded} onToggle=${(event) => narrow && fold(!event.target.open)}>
    <summary>Filters${numSet ? ` (${numSet} set)` : ""}</summary><div class="fields">
    <label>Question <${Typed} name="question" state=${state} /></label>
    <label>Text of the response <${Typed} name="text" state=${state} field=${search} /></label>
    <${Choice} label="Source" name="source" values=${found.sources} state=${state} set=${set} />
    <${Choice} label="Status" name="status" values=${found.statuses} state=${state} set=${set} />
    ${range("Reward", "reward", "any")} ${range("Searches", "searches", 1)} ${range("Tokens", "tokens", 1)}
    <${Choice} label="Component" name="component" values=${found.components} state=${state}
      set=${() => (event) => go({ component: event.target.value, min_component: undefined, max_component: undefined,
        sort: undefined, offset: undefined }, true)} />
    ${state.component && html`${range("Its value", "component", "any")}
      <button type="button" onClick=${() => go({ sort: "component", descending: state.descending ? undefined : "true", offset: undefined })}>
        Sort by ${state.component}</button>`}
    ${state.group && html`<p>Group ${state.group}</p>`}
    </div></details>
  </form>`;
}

// Whether the window is as narrow as a telephone, where the filters are folded; the same width as in style.css.
function useNarrow() {
  const query = matchMedia("(max-width: 700px)");
  const [narrow, set] = useState(query.matches);
  useEffect(() => {
    const changed = () => set(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return narrow;
}

function Choice({ label, name, values, state, set }) {
  const all = { ...(state[name] && { [state[name]]: 0 }), ...values };
  return html`<label>${label} <select name=${name} value=${state[name] ?? ""} onChange=${set(name)}>
    <option value="">any</option>
    ${Object.entries(all).map(([value, count]) => html`<option value=${value}>${value} (${count})</option>`)}
  </select></label>`;
}

// Asks only when typing pauses. Until then the draft is shown, whatever is drawn anew meanwhile.
function Typed({ name, state, field }) {
  const timer = useRef();
  const [draft, setDraft] = useState();
  const typed = (event) => {
    clearTimeout(timer.current);
    const value = event.target.value;
    setDraft(value);
    timer.current = setTimeout(() => {
      setDraft(undefined);
      go({ [name]: value, offset: undefined }, true);
    }, 250);
  };
  return html`<input type="search" name=${name} ref=${field} value=${draft ?? state[name] ?? ""} onInput=${typed} />`;
}
