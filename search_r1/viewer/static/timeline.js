// What the driver, each engine and each rank did in a step, as the run stored it for Perfetto.

import { html } from "./vendor/htm-preact.js";
import { useData } from "./api.js";
import { colour } from "./chart.js";
import { Problem, number } from "./format.js";
import { go } from "./state.js";

const ROW_REM = 1.3;
const NARROWEST = 0.0003; // of the whole; what is narrower could not be seen
const LABELLED = 0.05;

export function Timeline({ run, steps, state }) {
  const asked = Number(state.timeline);
  const step = state.timeline !== undefined && steps.includes(asked) ? asked : steps.at(-1);
  const { data, error } = useData("timeline", { run, step });
  return html`<section class="timeline" aria-label="Timeline of a step"><h2>Timeline of a step</h2>
    <label>Step <select name="timeline" value=${String(step)} onChange=${(event) => go({ timeline: event.target.value }, true)}>
      ${steps.map((one) => html`<option value=${String(one)}>${one}</option>`)}</select></label>
    ${error && html`<${Problem} error=${error} />`}
    ${data && html`<${Rows} data=${data} />`}</section>`;
}

function Rows({ data }) {
  const names = [...new Set(data.rows.flatMap((row) => row.spans.map((span) => span.name)))];
  const place = (name) => names.indexOf(name);
  return html`<div class="lanes" role="img" aria-label=${`Spans of step ${data.step}, ${number(data.seconds)} s; the table below has their sums`}>
      ${data.rows.map((row) => html`<div class="lane"><span class="who">${row.name}</span>
        <div class="spans" style=${{ height: `${(1 + Math.max(...row.spans.map((span) => span.depth))) * ROW_REM}rem` }}>
          ${row.spans.filter((span) => span.seconds / data.seconds > NARROWEST).map((span) => html`<div class="span" title=${`${span.name}: ${number(span.seconds)} s from ${number(span.start)} s on`}
            style=${{
              left: `${(100 * span.start) / data.seconds}%`, width: `${(100 * span.seconds) / data.seconds}%`,
              top: `${span.depth * ROW_REM}rem`, "--own": `var(${colour(place(span.name))})`,
            }}>${span.seconds / data.seconds > LABELLED ? span.name : ""}</div>`)}
        </div></div>`)}
      <div class="lane scale"><span class="who"></span><div class="ends"><span>0 s</span><span>${number(data.seconds, 2)} s</span></div></div>
    </div>
    <details><summary>Sums</summary><div class="scroll" tabindex="0" role="region" aria-label="Sums of the timeline"><table>
      <thead><tr>${["Process", "What", "Times", "Seconds"].map((title) => html`<th scope="col">${title}</th>`)}</tr></thead>
      <tbody>${data.rows.flatMap((row) => sums(row).map(([name, count, seconds]) => html`<tr><td>${row.name}</td><td>${name}</td><td>${count}</td><td>${number(seconds)}</td></tr>`))}</tbody>
    </table></div></details>`;
}

function sums(row) {
  const all = new Map();
  for (const span of row.spans) {
    const [count, seconds] = all.get(span.name) ?? [0, 0];
    all.set(span.name, [count + 1, seconds + span.seconds]);
  }
  return [...all].map(([name, [count, seconds]]) => [name, count, seconds]);
}
