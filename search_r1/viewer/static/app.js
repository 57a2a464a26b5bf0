// The page: what runs there are, which view is shown, keys, theme.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { NeedsToken, ask, setToken } from "./api.js";
import { Comparison } from "./compare.js";
import { Dashboard } from "./dashboard.js";
import { Problem } from "./format.js";
import { Group } from "./group.js";
import { Help, useKey } from "./keys.js";
import { List } from "./list.js";
import { ALL, LATEST, filesOf, go, kindOf, linkTo, stepOf, useHash, useNames } from "./state.js";
import { Trajectory } from "./trajectory.js";

const POLL_MS = 2000;
const VIEWS = { list: List, trajectory: Trajectory, group: Group, compare: Comparison, dashboard: Dashboard };
const THEMES = ["auto", "light", "dark"];

// The runs, asked for again and again while the page is seen: files come while a run goes on.
function useRuns(attempt) {
  const [found, set] = useState({});
  useEffect(() => {
    let timer;
    const look = async () => {
      if (!document.hidden) {
        await ask("runs").then(
          (runs) => set((before) => (!before.error && JSON.stringify(before.runs) === JSON.stringify(runs) ? before : { runs })),
          (error) => set((before) => ({ ...before, error })),
        );
      }
      timer = setTimeout(look, POLL_MS);
    };
    look();
    return () => clearTimeout(timer);
  }, [attempt]);
  return found;
}

function App() {
  const [attempt, setAttempt] = useState(0);
  const [help, setHelp] = useState(false);
  const { runs, error } = useRuns(attempt);
  const state = useHash();
  useNames(runs);
  useKey("?", () => setHelp(!help));
  useKey("c", () => go({ view: "compare", compare_offset: undefined }));
  useKey("l", () => go({ view: "list" }));
  useKey("d", () => go({ view: "dashboard", offset: undefined }));
  if (error instanceof NeedsToken) return html`<${Login} error=${error} done=${() => setAttempt(attempt + 1)} />`;
  if (!runs) return error ? html`<${Problem} error=${error} />` : html`<p class="wait" role="status">Loading</p>`;
  const named = state.run === undefined ? runs[0] : runs.find((one) => one.name === state.run);
  const run = named ?? runs[0];
  const View = VIEWS[state.view] ?? List;
  return html`
    <${Header} runs=${runs} run=${run} state=${state} openHelp=${() => setHelp(true)} />
    <main>
      ${error && html`<${Problem} error=${error} />`}
      ${!named ? html`<p class="problem" role="alert">There is no run ${state.run} here, or no longer; choose another one above.</p>`
        : run.files.length || state.view === "dashboard" ? html`<${View} runs=${runs} run=${run} state=${state} />`
        : html`<p class="wait" role="status">No trajectories yet in ${run.path}; they are shown when they come.</p>`}
    </main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

function Header({ runs, run, state, openHelp }) {
  const kinds = [...new Set(run.files.map((file) => file.kind))];
  const kind = kindOf(run, state);
  const steps = filesOf(run, kind).map((file) => file.step);
  const fresh = { view: "list", offset: undefined, compare_offset: undefined, file: undefined, row: undefined, group: undefined, at: undefined };
  const shown = state.step === ALL ? ALL : state.step === undefined || state.step === LATEST ? LATEST : String(stepOf(run, state));
  const draws = state.view === "dashboard";
  const lists = !VIEWS[state.view] || state.view === "list";
  const stays = draws || state.view === "compare" ? state.view : "list"; // the others are about one run
  const ofRun = { left: undefined, right: undefined, pair: undefined, step: undefined };
  return html`<header>
    <h1><a href=${linkTo({ ...fresh })}>Trajectories</a></h1>
    <label>Run <select name="run" value=${state.run ?? run.name} onChange=${(event) => go({ ...fresh, ...ofRun, view: stays, run: event.target.value })}>
      ${runs.map((one) => html`<option value=${one.name}>${one.name}</option>`)}
    </select></label>
    ${lists && html`<label>Kind <select name="kind" value=${kind} onChange=${(event) => go({ ...fresh, kind: event.target.value, step: undefined })}>
      ${kinds.map((one) => html`<option value=${one}>${one}</option>`)}
    </select></label>
    <label>Step <select name="step" value=${shown} onChange=${(event) => go({ ...fresh, step: event.target.value })}>
      <option value=${LATEST}>latest (${steps.at(-1)})</option>
      <option value=${ALL}>all</option>
      ${steps.map((step) => html`<option value=${String(step)}>${step}</option>`)}
    </select></label>`}
    <nav aria-label="Views">
      <a href=${linkTo({ view: "list" })} aria-current=${(state.view ?? "list") === "list" ? "page" : undefined}>List</a>
      <a href=${linkTo({ view: "compare", compare_offset: undefined })} aria-current=${state.view === "compare" ? "page" : undefined}>Compare</a>
      <a href=${linkTo({ view: "dashboard", offset: undefined })} aria-current=${draws ? "page" : undefined}>Dashboard</a>
      <${Theme} />
      <button onClick=${openHelp} title="Keys (?)">Keys</button>
    </nav>
    <p class="live" role="status">${run.files.length} files${run.files.length ? `, newest step ${Math.max(...run.files.map((file) => file.step))}` : ""}</p>
  </header>`;
}

function Theme() {
  const [theme, set] = useState(localStorage.getItem("theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
  }, [theme]);
  const next = () => set(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  useKey("t", next);
  return html`<button onClick=${next} title="Colours: auto, light, dark (t)">Theme: ${theme}</button>`;
}

function Login({ error, done }) {
  const [token, set] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setToken(token);
    done();
  };
  return html`<main><form class="login" onSubmit=${submit}>
    <h1>Trajectories</h1>
    ${error.isWrong && html`<${Problem} error=${error} />`}
    <label>Token of this server <input name="token" type="password" autocomplete="off" value=${token}
      onInput=${(event) => set(event.target.value)} /></label>
    <button>Open</button>
    <p>It was given as --auth_token or in SEARCH_R1_AUTH_TOKEN when the server was started.</p>
  </form></main>`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
