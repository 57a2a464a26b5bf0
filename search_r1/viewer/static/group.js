// Samples side by side: of one prompt, or of one question in two files.

import { html } from "./vendor/htm-preact.js";
import { useData } from "./api.js";
import { Clipped, Problem, components, number, rewardClass, signed } from "./format.js";
import { useKey } from "./keys.js";
import { go, linkTo } from "./state.js";
import { Transcript } from "./transcript.js";

export function Group({ run, state }) {
  const { data, error } = useData("group", { run: run.name, file: state.file, group: state.of }, run.version);
  useKey("u", () => go({ view: "list" }));
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="wait" role="status">Reading</p>`;
  return html`
    <p class="bar"><a href=${linkTo({ view: "list" })}>Back to the list</a></p>
    <h2 class="question"><${Clipped}>${data.samples[0].question ?? state.of}<//></h2>
    <${Clipped}>Gold: ${data.samples[0].gold.join(" | ") || "none"}<//>
    <${Samples} found=${data} label="Samples of the prompt" />`;
}

// Columns; `found` is what the server gives for a group or a question: of very many samples the first ones.
export function Samples({ found, label }) {
  const shown = found.samples.length;
  return html`<p>${found.num_samples} samples of ${found.file}, mean reward ${number(found.mean_reward)}.
    ${shown < found.num_samples ? ` The first ${shown} are shown.` : ""}
    ${found.formula ? ` Advantage of a sample: ${found.formula}.` : ""}</p>
  <div class="samples" tabindex="0" role="region" aria-label=${label}>
    ${found.samples.map((sample, place) => html`<article class="sample">
      <h3><a href=${linkTo({ view: "trajectory", run: found.run, kind: found.kind, file: found.file, row: sample.row, at: undefined })}>Sample ${place + 1}</a>
        <span class=${rewardClass(sample.reward)}>${number(sample.reward)}</span>
        ${sample.advantage !== null && html`<small class="advantage">advantage ${signed(sample.advantage)}</small>`}</h3>
      <p class="small">${sample.status}, ${sample.num_searches} searches, ${sample.num_tokens} tokens</p>
      <p class="small">${components(sample.reward_components)}</p>
      <div class="small"><${Clipped}>Answer: ${sample.answer ?? "none"}<//></div>
      <ul class="small">${sample.why.map((sentence) => html`<li><${Clipped}>${sentence}<//></li>`)}</ul>
      <${Transcript} segments=${sample.segments.filter((segment) => segment.source !== "prompt")} tokens=${null} />
    </article>`)}
  </div>`;
}
