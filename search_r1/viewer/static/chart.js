// One chart: uPlot, with keys, a text under it for who cannot see it, and a click that opens the step's trajectories.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { number } from "./format.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 210;
const NUM_COLOURS = 8;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const CLICK_PX = 4; // a pointer that moved further was selecting a range

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The colour of a series; after the eighth they come again, dashed.
export function colour(place) {
  return `--series-${(place % NUM_COLOURS) + 1}`;
}

// { steps, lines, columns, bands }: what uPlot draws; `lines[i]` says what column i + 1 is, or null for the edge of a band.
export function aligned(panel) {
  const steps = [...new Set(panel.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const spread = (one, values) => {
    const at = new Map(one.steps.map((step, place) => [step, values[place]]));
    return steps.map((step) => at.get(step) ?? null);
  };
  const values = panel.series.map((one) => spread(one, one.mean));
  const lines = panel.series.map((one, place) => ({ one, place, values: values[place] }));
  if (panel.stacked) {
    const columns = values.map(() => []);
    steps.forEach((_, at) => values.reduceRight((sum, column, place) => (columns[place][at] = sum + (column[at] ?? 0)), 0));
    return { steps, lines, columns, bands: lines.slice(1).map((_, place) => ({ series: [place + 1, place + 2] })) };
  }
  const columns = [...values];
  const edges = [];
  const bands = [];
  lines.forEach(({ one, place }) => {
    if (!one.low) return;
    columns.push(spread(one, one.high), spread(one, one.low));
    edges.push(null, null);
    bands.push({ series: [columns.length - 1, columns.length], place });
  });
  return { steps, lines: [...lines, ...edges], columns, bands };
}

export function nameOf(one, several) {
  return several ? `${one.label}, ${one.group}` : one.label;
}

// Up to three digits that matter, short enough for an axis.
function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(4)));
}

// Of a column, the place nearest to `at` that has a value.
function nearest(column, at) {
  for (let away = 0; away < column.length; away++) {
    if (column[at - away] != null) return at - away;
    if (column[at + away] != null) return at + away;
  }
  return null;
}

function options({ panel, drawn, several, alarms, range, width, zoom }) {
  const ink = css("--ink");
  const grid = { stroke: css("--line"), width: 0.5 };
  const shade = (place) => `color-mix(in srgb, ${css(colour(place))} ${panel.stacked ? 55 : 22}%, transparent)`;
  const series = drawn.lines.map((line, place) => line === null
    ? { class: "edge", label: "edge of a band", stroke: "transparent", points: { show: false }, spanGaps: true }
    : {
      label: nameOf(line.one, several), stroke: css(colour(line.place)), width: 2, spanGaps: true,
      dash: DASHES[Math.floor(line.place / NUM_COLOURS) % DASHES.length], class: "line",
      points: { show: line.one.steps.length < 30, size: 6 },
      fill: panel.stacked && place === drawn.lines.length - 1 ? shade(line.place) : undefined,
      value: (_, __, ___, at) => (at === null ? "-" : tickOr(line.values[at])),
    });
  const marks = (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = css("--bad");
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const { step } of alarms) {
      const x = u.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
  return {
    width, height: HEIGHT, series: [{ label: "step" }, ...series],
    bands: drawn.bands.map(({ series: pair, place }) => ({ series: pair, fill: shade(place ?? pair[0] - 1) })),
    scales: { x: { time: false, ...(range && { range: () => range }) }, y: { range: (_, low, high) => heights(panel, low, high) } },
    axes: [
      { stroke: ink, grid, ticks: grid, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 1e5] },
      { stroke: ink, grid, ticks: grid, size: 62, values: (_, all) => all.map(tick) },
    ],
    cursor: {
      sync: { key: "dashboard" }, drag: { x: true, y: false, dist: 5 },
      dataIdx: (_, column, at) => (column === 0 ? at : nearest(drawn.columns[column - 1], at)),
      bind: { dblclick: () => () => zoom(undefined) },
    },
    hooks: {
      draw: [marks],
      setSelect: [(u) => u.select.width > 0 && zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")])],
    },
  };
}

// Without values, or with nothing but 0, an axis up to 1.
function heights(panel, low, high) {
  if (!low && !high) return [0, 1];
  return panel.stacked ? [0, high * 1.05] : uPlot.rangeNum(low, high, 0.1, true);
}

function tickOr(value) {
  return value == null ? "-" : tick(value);
}

export function Chart({ panel, alarms, several, range, zoom, theme, open }) {
  const place = useRef();
  const plot = useRef();
  const latest = useRef();
  const [at, setAt] = useState({ line: 0, step: undefined });
  const [shown, setShown] = useState(false);
  const drawn = aligned(panel);
  const lines = drawn.lines.filter(Boolean);
  latest.current = { drawn, lines, open };

  useEffect(() => {
    const room = place.current;
    const width = () => Math.max(220, room.clientWidth);
    const u = new uPlot(options({ panel, drawn, several, alarms, range, width: width(), zoom }), [drawn.steps, ...drawn.columns], room);
    plot.current = u;
    let begun = 0;
    u.over.addEventListener("pointerdown", (event) => (begun = event.clientX));
    u.over.addEventListener("click", (event) => Math.abs(event.clientX - begun) <= CLICK_PX && openNearest(u, event, latest.current));
    const watch = new ResizeObserver(() => u.setSize({ width: width(), height: HEIGHT }));
    watch.observe(room);
    return () => {
      watch.disconnect();
      u.destroy();
    };
  }, [JSON.stringify([panel, alarms, range, several]), theme]);

  const line = lines[Math.min(at.line, lines.length - 1)];
  const own = line.one.steps;
  const move = (change) => {
    const now = own.indexOf(at.step);
    const next = own[Math.max(0, Math.min(own.length - 1, now < 0 ? (change > 0 ? 0 : own.length - 1) : now + change))];
    setAt({ ...at, step: next });
    plot.current.setCursor({ left: plot.current.valToPos(next, "x"), top: 10 });
  };
  const choose = (change) => setAt({ line: (at.line + change + lines.length) % lines.length, step: at.step });
  const keys = {
    ArrowLeft: () => move(-1), ArrowRight: () => move(1), Home: () => move(-Infinity), End: () => move(Infinity),
    ArrowUp: () => choose(-1), ArrowDown: () => choose(1), Enter: () => at.step !== undefined && open(line.one, at.step),
  };
  const pressed = (event) => {
    if (!keys[event.key] || event.target !== event.currentTarget) return;
    event.preventDefault();
    keys[event.key]();
  };
  const value = line.values[drawn.steps.indexOf(at.step)];
  const told = at.step === undefined ? "" : `step ${at.step}, ${nameOf(line.one, several)}: ${tickOr(value)}`;
  return html`<figure class="panel" data-panel=${panel.key}>
    <figcaption>${panel.title}${panel.unit && html` <small>${panel.unit}</small>`}</figcaption>
    <div class="chart" ref=${place} tabindex="0" role="group" onKeyDown=${pressed}
      aria-label=${`${panel.title}. Left and right: steps; up and down: curves; Enter: the trajectories of the step.`}></div>
    <p class="told" role="status">${told}</p>
    <details onToggle=${(event) => setShown(event.target.open)}><summary>Values</summary>
      ${shown && html`<${Values} steps=${drawn.steps} lines=${lines} several=${several} title=${panel.title} open=${open} />`}</details>
  </figure>`;
}

function openNearest(u, event, { lines, open }) {
  const away = lines.map((line, place) => {
    const at = u.cursor.idxs?.[place + 1] ?? null;
    if (at === null || !u.series[place + 1].show) return { far: Infinity };
    const x = u.valToPos(u.data[0][at], "x") - event.offsetX;
    const y = u.valToPos(u.data[place + 1][at], "y") - event.offsetY;
    return { far: Math.hypot(x, y), line, step: u.data[0][at] };
  });
  const best = away.reduce((a, b) => (b.far < a.far ? b : a));
  if (best.line) open(best.line.one, best.step);
}

function Values({ steps, lines, several, title, open }) {
  const cell = ({ one, values }, at) => values[at] === null ? html`<td>-</td>`
    : html`<td><button onClick=${() => open(one, steps[at])} title="Trajectories of this step">${number(values[at], 4)}</button></td>`;
  return html`<div class="scroll values" tabindex="0" role="region" aria-label=${`Values: ${title}`}><table>
    <thead><tr><th scope="col">step</th>${lines.map(({ one }) => html`<th scope="col">${nameOf(one, several)}</th>`)}</tr></thead>
    <tbody>${steps.map((step, at) => html`<tr><th scope="row">${step}</th>${lines.map((line) => cell(line, at))}</tr>`)}</tbody>
  </table></div>`;
}
