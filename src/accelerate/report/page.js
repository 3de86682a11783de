"use strict";
// The page of some runs. Everything that comes from a run is set as text, never as HTML.
// Each is read on a white and on a dark ground.
const COLORS = ["#3b82c4", "#e0762b", "#3a9d5d", "#cf4a7d", "#8f73d6", "#a88524", "#1fa3b8", "#7f8794"];
const element = (name, attributes = {}, ...children) => {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
};
const byId = (id) => document.getElementById(id);
let data = JSON.parse(byId("data").textContent);
let plots = [];

const showNumber = (value) =>
  value === null ? "-" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(3) : String(Number(value.toPrecision(5)));
const showBytes = (value) => {
  const power = value > 0 ? Math.min(4, Math.floor(Math.log(value) / Math.log(1024))) : 0;
  return Number((value / 1024 ** power).toPrecision(4)) + " " + ["B", "KB", "MB", "GB", "TB"][power];
};
const showTime = (seconds) => {
  if (seconds >= 7200) return (seconds / 3600).toFixed(2) + " h";
  if (seconds >= 120) return (seconds / 60).toFixed(1) + " min";
  const [factor, unit] = seconds >= 1 || seconds === 0 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  return Number((seconds * factor).toPrecision(3)) + " " + unit;
};
const show = (value, unit) =>
  value === null ? "-" : unit === "B" ? showBytes(value) : unit === "s" ? showTime(value) : showNumber(value);

// The exponential mean with its start corrected, as Adam corrects its moments.
const smoothed = (values, share) => {
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
};

const drawChart = (chart, options) => {
  const colors = getComputedStyle(document.documentElement);
  const line = colors.getPropertyValue("--line"), dim = colors.getPropertyValue("--dim");
  const curves = chart.curves.filter((curve) => curve.value.length);
  const columns = curves.map((curve) => [curve[options.axis],
    options.smooth > 0 ? smoothed(curve.value, options.smooth) : curve.value]);
  // On a log scale only what is above zero can be drawn.
  const isLog = options.log && columns.some(([, y]) => y.some((value) => value > 0));
  const tables = columns.map(([x, y]) => {
    const order = x.map((_, index) => index).sort((a, b) => x[a] - x[b]);
    return [order.map((i) => x[i]), order.map((i) => (isLog && y[i] <= 0 ? null : y[i]))];
  });
  const box = element("article", { className: "chart", tabIndex: 0 });
  box.setAttribute("aria-label", chart.title);
  const save = element("button", { type: "button", title: "Save this chart as a picture" }, "PNG");
  const unit = ["", "B", "s"].includes(chart.unit) ? "" : ` (${chart.unit})`;
  box.append(element("h3", {}, element("span", {}, chart.title + unit), save));
  const place = element("div");
  box.append(place);
  for (const curve of chart.curves) {
    const points = curve.points > curve.value.length + curve.not_finite ? `, ${curve.points} points` : "";
    box.append(element("p", {}, element("span", { className: "swatch",
      style: `background:${COLORS[curve.color % COLORS.length]}` }),
    `${curve.name}: last ${show(curve.last, chart.unit)}, least ${show(curve.min, chart.unit)}, ` +
    `greatest ${show(curve.max, chart.unit)}${points}`));
    if (curve.not_finite) box.append(element("p", { className: "warn" },
      `${curve.not_finite} of ${curve.points} values of ${curve.name} are NaN or infinite, the first at step ` +
      `${curve.first_not_finite}`));
  }
  if (chart.note) box.append(element("p", {}, chart.note));
  byId("charts").append(box);
  if (!curves.length) return;
  const plot = new uPlot({
    width: Math.max(place.clientWidth, 200), height: 210,
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    cursor: { sync: { key: "runs" } },
    axes: [
      { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line },
        values: (_, splits) => splits.map((each) => (options.axis === "time" ? showTime(each) : showNumber(each))) },
      { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, size: 72,
        values: (_, splits) => splits.map((each) => (each === null ? "" : show(each, chart.unit))) },
    ],
    series: [{ label: options.axis, value: (_, x) => (x === null ? "-" : options.axis === "time" ? showTime(x) : showNumber(x)) },
      ...curves.map((curve) => ({
      label: curve.name, stroke: COLORS[curve.color % COLORS.length], width: 1.6, spanGaps: true,
      value: (_, y) => (y === null || y === undefined ? "-" : show(y, chart.unit)),
      points: { show: curve.value.length < 25 } }))],
  }, uPlot.join(tables), place);
  save.addEventListener("click", () => savePicture(plot, chart.title));
  box.addEventListener("keydown", (event) => { if (event.target === box && pressKey(plot, event)) event.preventDefault(); });
  plots.push({ plot, place });
};

// Arrows move the cursor of a chart that has the focus, + and - zoom around it, 0 or Escape shows all.
const pressKey = (plot, { key, shiftKey }) => {
  const xs = plot.data[0], { min, max } = plot.scales.x;
  const clamp = (index) => Math.min(Math.max(index, 0), xs.length - 1);
  const at = plot.cursor.idx ?? null;
  const factor = { "+": 0.5, "=": 0.5, "-": 2 }[key];
  const move = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (factor !== undefined) {
    const middle = at === null ? (min + max) / 2 : xs[at];
    const low = Math.max(xs[0], middle - (middle - min) * factor), high = Math.min(xs[xs.length - 1], middle + (max - middle) * factor);
    if (high > low) plot.setScale("x", { min: low, max: high });
  } else if (move !== undefined) {
    const next = clamp(at === null ? (move > 0 ? 0 : xs.length - 1) : at + move * (shiftKey ? 10 : 1));
    if (xs[next] < min || xs[next] > max) plot.setScale("x", { min: min + xs[next] - xs[at], max: max + xs[next] - xs[at] });
    plot.setCursor({ left: plot.valToPos(xs[next], "x"), top: plot.over.clientHeight / 2 }, true, true);
  } else if (key === "0" || key === "Escape") {
    plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
  } else return false;
  return true;
};

const savePicture = (plot, title) => {
  const source = plot.ctx.canvas;
  const copy = element("canvas", { width: source.width, height: source.height + 40 });
  const context = copy.getContext("2d");
  const colors = getComputedStyle(document.documentElement);
  context.fillStyle = colors.getPropertyValue("--panel");
  context.fillRect(0, 0, copy.width, copy.height);
  context.fillStyle = colors.getPropertyValue("--text");
  context.font = `${14 * devicePixelRatio}px system-ui, sans-serif`;
  context.fillText(title, 12, 26);
  context.drawImage(source, 0, 40);
  copy.toBlob((blob) => {
    const link = element("a", { href: URL.createObjectURL(blob), download: title.replace(/[^\w.-]+/g, "_") + ".png" });
    link.click();
    URL.revokeObjectURL(link.href);
  });
};

const table = (title, columns, rows, marked = () => false) => {
  if (!rows.length) return;
  const valueOf = (row, index) => Array.isArray(row) ? row[index] : row[columns[index]];
  // A column is to the right where all that it holds are numbers.
  const classes = columns.map((_, index) => rows.every((row) => typeof valueOf(row, index) === "number") ? "number" : "");
  const body = rows.map((row) => element("tr", { className: marked(row) ? "marked" : "" },
    ...columns.map((_, index) => {
      const value = valueOf(row, index);
      const text = value === null || value === undefined ? "-" : typeof value === "object" ? JSON.stringify(value) : String(value);
      return element("td", { className: classes[index] }, text);
    })));
  byId("tables").append(element("h2", {}, title), element("div", { className: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {},
      ...columns.map((column, index) => element("th", { scope: "col", className: classes[index] }, String(column))))),
    element("tbody", {}, ...body))));
};

const drawTables = () => {
  byId("tables").replaceChildren();
  table("Ranks", ["run", "rank", "steps", "median step", "median own time", "95 % of steps under", "waiting for data", "peak memory"],
    data.ranks, (row) => row.slowest);
  const slow = data.ranks.filter((row) => row.slowest);
  if (slow.length) byId("tables").append(element("p", {}, "In bold: the rank whose own time in a step " +
    "(waiting for data, and until the backward begins) is the longest."));
  table("Health", ["run", "step", "rank", "what", "where", "samples"], data.health);
  table("Checkpoints", ["run", "step", "checkpoint", "size", "took"], data.checkpoints);
  table(data.runs.length > 1 ? "Configuration (in bold: differs)" : "Configuration",
    ["name", ...data.runs.map((run) => run.name)],
    data.config.map((row) => Object.assign([row.name, ...row.values], { differs: row.differs })),
    (row) => data.runs.length > 1 && row.differs);
  for (const each of data.tables) table(each.title, each.columns, each.rows);
  for (const [name, facts] of data.environment)
    for (const [title, values] of Object.entries(facts)) {
      const isTable = Array.isArray(values);
      table(data.runs.length > 1 ? `${title} (${name})` : title,
        isTable ? Object.keys(values[0] || {}) : ["name", "value"], isTable ? values : Object.entries(values));
    }
};

const drawHead = () => {
  const names = data.runs.map((run) => run.name);
  document.title = byId("title").textContent = names.length > 3 ? `${names.length} runs` : names.join(", ");
  byId("legend").replaceChildren(...data.runs.map((run, index) => element("li", {},
    element("span", { className: "swatch", style: `background:${COLORS[index % COLORS.length]}` }), run.name,
    element("small", {}, Object.entries({ began: new Date(run.start * 1000).toLocaleString(), ...run.facts })
      .map(([key, value]) => `${key}: ${value}`).join(" · ")))));
};

const draw = () => {
  for (const { plot } of plots) plot.destroy();
  plots = [];
  byId("charts").replaceChildren();
  const words = byId("filter").value.toLowerCase();
  const options = { axis: byId("axis").value, log: byId("log").checked, smooth: Number(byId("smooth").value) };
  for (const chart of data.charts) if (chart.title.toLowerCase().includes(words)) drawChart(chart, options);
};

for (const id of ["axis", "log", "smooth", "filter"]) byId(id).addEventListener("input", draw);
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", () => {
  for (const { plot, place } of plots) plot.setSize({ width: Math.max(place.clientWidth, 200), height: 210 });
});
if (REFRESH_SECONDS) setInterval(async () => {
  try {
    const text = await (await fetch("data.json")).text();
    if (text === byId("data").textContent) return;
    byId("data").textContent = text;
    data = JSON.parse(text);
    drawHead(); draw(); drawTables();
  } catch { /* the command has ended: the page keeps what it has */ }
}, REFRESH_SECONDS * 1000);
drawHead(); draw(); drawTables();
