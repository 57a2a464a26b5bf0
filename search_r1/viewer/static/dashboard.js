// The curves of runs, the alarms of their collapse guards, and the timeline of a step.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { ask, useData } from "./api.js";
import { Chart } from "./chart.js";
import { Problem } from "./format.js";
import { go, linkTo, namesIn } from "./state.js";
import { Timeline } from "./timeline.js";

const POLL_MS = 2000;

// The names in `state.with`, of runs that are there.
function comparedWith(runs, run, state) {
  const there = new Set(runs.map((one) => one.name));
  return namesIn(state.with).filter((name) => there.has(name) && name !== run.name);
}

// Changes when one of the runs logs a step.
function useVersion(names) {
  const [version, set] = useState("");
  useEffect(() => {
    let timer;
    let stopped = false;
    const look = async () => {
      if (!document.hidden) await ask("dashboard/version", { run: names }).then((found) => !stopped && set(found.version), () => {});
      if (!stopped) timer = setTimeout(look, POLL_MS);
    };
    look();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, [JSON.stringify(names)]);
  return version;
}

// Changes with the colours of the page, which a canvas does not follow by itself.
function useColours() {
  const [count, set] = useState(0);
  useEffect(() => {
    const changed = () => set((before) => before + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const watch = new MutationObserver(changed);
    watch.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    dark.addEventListener("change", changed);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", changed);
    };
  }, []);
  return count;
}

export function Dashboard({ runs, run, state }) {
  const others = comparedWith(runs, run, state);
  const names = [run.name, ...others];
  const bySeed = state.seeds !== "apart";
  const theme = useColours();
  const { data, error } = useData("dashboard", { run: names, by_seed: bySeed }, useVersion(names));
  const [missing, setMissing] = useState("");
  const range = state.from !== undefined && state.to !== undefined ? [Number(state.from), Number(state.to)] : undefined;
  const zoom = (wanted) => go({ from: wanted?.[0].toFixed(2), to: wanted?.[1].toFixed(2) }, true);
  // Of the runs that a point is about, the first that has stored its step.
  const open = ({ runs: asked, kind }, step) => {
    const has = (one) => one?.files.some((file) => file.kind === kind && file.step === step);
    const stored = asked.find((name) => has(runs.find((one) => one.name === name)));
    if (!stored) return setMissing(`There are no stored trajectories of step ${step} (${kind}) of ${asked.join(", ")}.`);
    const clear = { offset: undefined, file: undefined, row: undefined, group: undefined, at: undefined };
    return go({ ...clear, view: "list", run: stored, kind, step: String(step) });
  };
  const choose = (name, on) => {
    const chosen = on ? [...others, name] : others.filter((one) => one !== name);
    go({ with: chosen.length ? JSON.stringify(chosen) : undefined }, true);
  };
  return html`<div class="dashboard">
    <form class="filters" aria-label="What is drawn" onSubmit=${(event) => event.preventDefault()}>
      ${runs.length > 1 && html`<details open=${others.length > 0}><summary>Compare with (${others.length})</summary><fieldset><legend class="hidden">Runs</legend>
        ${runs.filter((one) => one.name !== run.name).map((one) => html`<label><input type="checkbox" checked=${others.includes(one.name)}
          onChange=${(event) => choose(one.name, event.target.checked)} /> ${one.name}</label>`)}</fieldset></details>
        <label><input type="checkbox" name="seeds" checked=${bySeed}
          onChange=${(event) => go({ seeds: event.target.checked ? undefined : "apart" }, true)} /> Seeds of one configuration as one curve with its range</label>`}
      ${range && html`<button type="button" onClick=${() => zoom(undefined)}>All steps (now ${Math.ceil(range[0])} to ${Math.floor(range[1])})</button>`}
    </form>
    ${error && html`<${Problem} error=${error} />`}
    ${missing && html`<p class="note" role="status">${missing}</p>`}
    ${!data && !error && html`<p class="wait" role="status">Loading</p>`}
    ${data && html`<${Drawn} data=${data} run=${run} state=${state} range=${range} zoom=${zoom} theme=${theme} open=${open} />`}
  </div>`;
}

function Drawn({ data, run, state, range, zoom, theme, open }) {
  const several = data.groups.length > 1;
  const panels = data.panels.flatMap((panel) => (panel.stacked ? apart(panel, data.groups) : [panel]));
  const timelines = data.runs[0].timelines;
  return html`<ul class="runs">${data.runs.map((one) => html`<li>${one.name}: ${one.last_step === null ? "no step yet" : `step ${one.last_step}${one.total_steps ? ` of ${one.total_steps}` : ""}`}</li>`)}</ul>
    ${several || data.groups[0].runs.length > 1 ? html`<p class="note">Curves: ${data.groups.map((group) => `${group.label} (${group.runs.length === 1 ? "1 run" : `mean and range of ${group.runs.length} runs`})`).join("; ")}.</p>` : ""}
    <${Alarms} alarms=${data.alarms} open=${open} />
    ${panels.length ? html`<p class="note">A click on a curve opens the trajectories of that step. Drag to zoom, double click for all steps.</p>
      <div class="panels">${panels.map((panel) => html`<${Chart} key=${panel.key} panel=${panel} several=${several && !panel.stacked}
        alarms=${data.alarms} range=${range} zoom=${zoom} theme=${theme} open=${open} />`)}</div>`
    : html`<p class="wait" role="status">No metrics yet; they are drawn when they come.</p>`}
    ${timelines.length > 0 && html`<${Timeline} run=${run.name} steps=${timelines} state=${state} />`}`;
}

// A stacked panel of each configuration: two stacks in one chart cannot be read.
function apart(panel, groups) {
  return groups.map((group) => ({
    ...panel,
    key: groups.length > 1 ? `${panel.key} ${group.label}` : panel.key,
    title: groups.length > 1 ? `${panel.title}: ${group.label}` : panel.title,
    series: panel.series.filter((one) => one.group === group.label),
  })).filter((one) => one.series.length);
}

function Alarms({ alarms, open }) {
  if (!alarms.length) return null;
  const held = (one) => Object.entries(one.conditions).map(([name, steps]) => `${name} for ${steps} ${steps === 1 ? "step" : "steps"}`).join(", ");
  return html`<section class="alarms" aria-label="Alarms"><h2>Alarms of the collapse guard <small>(dashed lines)</small></h2>
    <ul>${alarms.map((one) => html`<li><a href=${linkTo({ view: "list", run: one.run, kind: "train", step: String(one.step), offset: undefined })}
      onClick=${(event) => { event.preventDefault(); open({ runs: [one.run], kind: "train" }, one.step); }}>${one.run}, step ${one.step}</a>: ${held(one)}</li>`)}</ul></section>`;
}
