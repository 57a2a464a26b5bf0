// Two files by question: of two steps, or of two runs.

import { html } from "./vendor/htm-preact.js";
import { useData } from "./api.js";
import { Clipped, Problem, Scroll, number, rewardClass, signed } from "./format.js";
import { Samples } from "./group.js";
import { useKey } from "./keys.js";
import { Pager } from "./list.js";
import { filesOf, go, linkTo } from "./state.js";

const PAGE = 50;
const ORDER = ["val", "test", "train"]; // only validations are of the same questions each time

export function Comparison({ runs, run, state }) {
  const right = runs.find((one) => one.name === state.other_run) ?? run;
  const left = fileOf(run, state.left) ?? usual(run).at(right === run ? 0 : -1);
  const other = fileOf(right, state.right) ?? filesOf(right, left.kind).at(-1) ?? right.files.at(-1);
  useKey("u", () => go({ view: "list" }));
  const sides = { run: run.name, file: left.name, other_run: right.name, other_file: other?.name };
  const choose = (name) => (event) => go({ [name]: event.target.value, pair: undefined, compare_offset: undefined });
  const menu = (label, name, value, values) => html`<label>${label} <select name=${name} value=${value} onChange=${choose(name)}>
    ${values.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>`;
  return html`<form class="filters" aria-label="What is compared" onSubmit=${(event) => event.preventDefault()}>
      ${menu("Left, of this run", "left", left.name, run.files.map((file) => file.name))}
      ${menu("Right run", "other_run", right.name, runs.map((one) => one.name))}
      ${menu("Right", "right", other?.name, right.files.map((file) => file.name))}
    </form>
    ${other ? (state.pair === undefined ? html`<${Questions} sides=${sides} state=${state} version=${run.version + right.version} />`
      : html`<${Pair} sides=${sides} state=${state} />`) : html`<p class="wait">${right.name} has no trajectories yet.</p>`}`;
}

// The files of the first kind that has two of them to compare, or else of the first kind.
function usual(run) {
  const kinds = [...new Set([...ORDER, ...run.files.map((file) => file.kind)])].map((kind) => filesOf(run, kind));
  return kinds.find((files) => files.length > 1) ?? kinds.find((files) => files.length);
}

function fileOf(run, name) {
  return run.files.find((file) => file.name === name);
}

function Questions({ sides, state, version }) {
  const query = { ...sides, source: state.source, question: state.question, descending: state.improved, offset: state.compare_offset, limit: PAGE };
  const { data, error, waiting } = useData("compare", query, version);
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="wait" role="status">Comparing</p>`;
  const link = (row) => linkTo({ view: "compare", pair: row.left_row });
  const turn = () => go({ improved: state.improved ? undefined : "true", compare_offset: undefined });
  return html`<p class="summary">${data.total} questions in both: ${data.rose} rose, ${data.fell} fell, ${data.stayed} stayed${data.unscored ? `, ${data.unscored} without a reward on one side` : ""}; ${data.only_left} only on the left, ${data.only_right} only on the right.</p>
    ${(state.source || state.question) && html`<p class="note">Only what the filters of the list let through:
      ${[state.source, state.question].filter(Boolean).join(", ")}.
      <button onClick=${() => go({ source: undefined, question: undefined, offset: undefined, compare_offset: undefined })}>Compare all</button></p>`}
    <${Pager} state=${state} total=${data.total} waiting=${waiting} page=${PAGE} name="compare_offset" />
    <${Scroll} label="Questions"><table class="rows">
      <thead><tr><th scope="col" aria-sort=${state.improved ? "descending" : "ascending"}><button onClick=${turn}
        title=${state.improved ? "Those that improved the most are first" : "Those that got worse the most are first"}>Change ${state.improved ? "\u25bc" : "\u25b2"}</button></th>
        ${[sides.file, sides.other_file, "Question", "Source"].map((title) => html`<th scope="col">${title}</th>`)}</tr></thead>
      <tbody>${data.rows.map((row) => html`<tr key=${`${row.data_source} ${row.left_row}`} onClick=${(event) => event.target.closest("a, button") || (location.hash = link(row))}>
        <td class=${row.change ? rewardClass(row.change) : "reward none"}>${signed(row.change)}</td>
        <td>${number(row.left_reward)} <small>of ${row.left_num}</small></td><td>${number(row.right_reward)} <small>of ${row.right_num}</small></td>
        <td class="question"><${Clipped}><a href=${link(row)}>${row.question}</a><//></td><td class="small">${row.data_source}</td></tr>`)}</tbody>
    </table><//>`;
}

function Pair({ sides, state }) {
  const of = (run, file) => ({ run: sides.run, file: sides.file, row: state.pair, other_run: run, other_file: file });
  const left = useData("question", of(sides.run, sides.file));
  const right = useData("question", of(sides.other_run, sides.other_file));
  const back = html`<p class="bar"><a href=${linkTo({ pair: undefined })}>Back to the questions</a></p>`;
  return html`${back}${left.data && html`<h2 class="question"><${Clipped}>${left.data.samples[0]?.question ?? ""}<//></h2>
      <${Clipped}>Gold: ${left.data.samples[0]?.gold.join(" | ") || "none"}<//>`}
    <div class="pair">${[left, right].map(({ data, error }, side) => html`<section class="side" aria-label=${side ? "Right" : "Left"}>
      ${error && html`<${Problem} error=${error} />`}
      ${data && html`<h3>${data.run}, ${data.file}</h3>${data.samples.length
        ? html`<${Samples} found=${data} label=${`Samples of ${data.run}, ${data.file}`} />` : html`<p>It does not have this question.</p>`}`}
    </section>`)}</div>`;
}
