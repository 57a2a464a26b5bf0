// One trajectory: why it got its reward, its group, its searches, its text.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { ask, download, useData } from "./api.js";
import { Clipped, Problem, Runs, Scroll, number, rewardClass, signed } from "./format.js";
import { useKey } from "./keys.js";
import { go, linkTo, listQuery } from "./state.js";
import { TEXT, label, overlays } from "./overlay.js";
import { Transcript } from "./transcript.js";

export function Trajectory({ run, state }) {
  const place = { run: run.name, file: state.file, row: state.row };
  const stamp = run.files.find((file) => file.name === state.file)?.stamp;
  const { data, error } = useData("trajectory", place, stamp);
  const [problem, setProblem] = useState();
  const told = (work) => (...given) => work(...given).then(() => setProblem(undefined), setProblem);
  const step = told(async (by) => {
    const at = Number(state.at ?? -1) + by;
    if (state.at === undefined || at < 0) return;
    const { rows } = await ask("rows", { ...listQuery(run, state), offset: at, limit: 1 });
    if (rows.length) go({ file: rows[0].file, row: rows[0].row, at }, true);
  });
  const save = told(async () => data && download("export", place, `${run.name.replaceAll("/", "_")}_${state.file}_row${state.row}.html`));
  const kinds = overlays(data?.tokens);
  const overlay = kinds.includes(state.overlay) ? state.overlay : TEXT;
  const group = data && { view: "group", file: state.file, of: data.group_id };
  useKey("j", () => step(1));
  useKey("k", () => step(-1));
  useKey("u", () => go({ view: "list" }));
  useKey("e", save);
  useKey("g", () => group && go(group));
  useKey("o", () => go({ overlay: kinds[(kinds.indexOf(overlay) + 1) % kinds.length] }, true));
  useEffect(() => {
    scrollTo(0, 0);
    setProblem(undefined);
  }, [state.file, state.row]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="wait" role="status">Reading</p>`;
  return html`
    <p class="bar"><a href=${linkTo({ view: "list" })}>Back to the list</a>
      ${state.at !== undefined && html`<button onClick=${() => step(-1)}>Previous</button><button onClick=${() => step(1)}>Next</button>`}
      <a href=${linkTo(group)}>Group side by side</a>
      <button onClick=${save}>Save as HTML</button></p>
    ${problem && html`<${Problem} error=${problem} />`}
    <h2 class="question"><${Clipped}>${data.question ?? data.group_id}<//></h2>
    <${Facts} data=${data} />
    <${Why} data=${data} />
    <${GroupStrip} data=${data} />
    <${Searches} searches=${data.searches} />
    <${Calls} calls=${data.calls} />
    <h3>Text</h3>
    <fieldset class="overlays"><legend>Overlay</legend>${kinds.map((name) => html`<label>
      <input type="radio" name="overlay" value=${name} checked=${overlay === name} onChange=${() => go({ overlay: name }, true)} /> ${label(name)}</label>`)}
    </fieldset>
    ${data.notes.map((note) => html`<p class="note">${note}</p>`)}
    <${Transcript} key=${`${state.file} ${state.row}`} segments=${data.segments} tokens=${data.tokens} overlay=${overlay} />`;
}

function Facts({ data }) {
  const facts = [
    ["status", data.status], ["source", data.data_source], ["step", data.step], ["file", `${data.file}, row ${data.row}`],
    ["turns", data.num_turns], ["searches", data.num_searches], ["tokens", `${data.num_tokens}, ${data.num_policy_tokens} of the policy`],
    ["weights", `version ${data.weight_version}`],
  ];
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Why({ data }) {
  return html`<section class="why" aria-label="Why this reward">
    <h3>Reward <span class=${rewardClass(data.reward)}>${number(data.reward)}</span></h3>
    <ul>${data.why.map((sentence) => html`<li><${Clipped}>${sentence}<//></li>`)}</ul>
    <dl class="facts"><div><dt>answer</dt><dd><${Clipped}>${data.answer ?? "none"}<//></dd></div>
      <div><dt>gold</dt><dd><${Clipped}>${data.gold.length ? data.gold.join(" | ") : "none"}<//></dd></div></dl>
    <${Components} data=${data} />
  </section>`;
}

function Components({ data }) {
  const { rule, components } = data;
  const isSum = components.some((one) => one.weight !== null);
  return html`
    ${components.length > 0 && html`<${Scroll} label="Components of the reward"><table class="components">
      <thead><tr><th scope="col">Component</th><th scope="col">Value</th>${isSum && html`<th scope="col">Weight</th>`}<th scope="col">Rule</th></tr></thead>
      <tbody>${components.map((one) => html`<tr><th scope="row">${one.name}</th><td>${number(one.value)}</td>
        ${isSum && html`<td>${number(one.weight)}</td>`}<td class="rule">${one.text || "-"}</td></tr>`)}</tbody></table><//>`}
    ${rule.function && html`<details><summary>Rule of the reward: <code>${rule.function}</code></summary>
      ${rule.text && html`<pre>${rule.text}</pre>`}<pre>${JSON.stringify(rule.arguments, null, 2)}</pre></details>`}`;
}

function GroupStrip({ data }) {
  const { rows, rewards, mean_reward: mean, advantage, formula } = data.group;
  if (rows.length < 2) return null;
  return html`<p class="strip"><strong>${rows.length} samples of this prompt</strong>, mean reward ${number(mean)}
    ${advantage !== null && html`, advantage ${signed(advantage)} <small>${formula}</small>`}
    <span>${rows.map((row, place) => html`<a class=${rewardClass(rewards[place])} href=${linkTo({ row, at: undefined })}
      aria-current=${row === data.row ? "true" : undefined} aria-label=${`sample ${place + 1}, reward ${number(rewards[place])}`}>${number(rewards[place])}</a> `)}</span></p>`;
}

function Calls({ calls }) {
  if (!calls.length) return null;
  return html`<h3>Tool calls</h3>${calls.map((call) => html`<details class="search call" open>
    <summary>Turn ${call.turn}: <strong>${call.name || "no name"}</strong> <code>${call.arguments}</code>
      <small class=${call.status === "ok" ? "good" : "bad"}> ${call.status}${call.ms === null ? "" : `, ${number(call.ms, 1)} ms`}</small></summary>
    <div class="passage"><${Clipped}><${Runs} runs=${call.result} /><//></div></details>`)}`;
}

function Searches({ searches }) {
  if (!searches.length) return null;
  return html`<h3>Searches</h3>${searches.map((search) => html`<details class="search" open>
    <summary>Turn ${search.turn}: <q>${search.query}</q>
      <small> ${search.executed ? `${search.passages.length} passage${search.passages.length === 1 ? "" : "s"}${search.ms === null ? "" : `, ${number(search.ms, 1)} ms`}` : "not executed"}</small></summary>
    <ol>${search.passages.map((one) => html`<li><strong><${Clipped}><${Runs} runs=${one.title} /><//></strong>
      <small> ${one.id === null ? "" : `id ${one.id}`}${one.score === null ? "" : `, score ${number(one.score)}`}</small>
      <div class="passage"><${Runs} runs=${one.text} /></div></li>`)}</ol></details>`)}`;
}
