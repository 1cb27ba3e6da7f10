// Draws the schedule that stands in the page as JSON (see zfx/picture.py). All text from the data becomes text nodes or canvas text,
// never HTML. Times are microseconds, sizes bytes, unless a name says elements.
(() => {
"use strict";

// ------------------------------------------------------------------------------------------------------------ the data

const data = JSON.parse(document.getElementById("schedule").textContent);
const { steps, collectives, moments, parameters, lives, limits, totals, marks, certificate } = data;
const numSteps = steps.name.length, numMoments = moments.time.length, numCollectives = collectives.bytes.length;
const finish = Math.max(totals.finish_us, ...collectives.end.slice(-4), 0) || 1; // a row of nothing is a microsecond wide
const PHASES = { f: "forward", t: "turn", b: "backward" };
const LANES = ["phase", "compute", ...data.channels, "parameter"];
const LIFE = LANES.length - 1;
const KINDS = {
  bytes: ["parameters", "packing", ...(data.reshard_to ? ["secondary"] : []), "gradients", "activations", "shards"],
  elements: ["parameters", "packing"],
};
const MEMORY = {
  bytes: {
    parameters: moments.parameters, packing: moments.packing, secondary: moments.secondary, gradients: moments.gradients,
    activations: moments.activations,
    shards: new Array(numMoments).fill(data.shards),
  },
  elements: { parameters: moments.live_elements, packing: moments.packing_elements },
};
const CHANNEL = { gather: [], reduce: [], all_reduce: [] }; // collectives in order of launch, which on one channel is the order of start
const channelOf = (c) => ({ g: "gather", d: "reduce", a: "all_reduce" })[collectives.kind[c]];
for (let c = 0; c < numCollectives; c++) CHANNEL[channelOf(c)].push(c);
const stalls = collectives.exposed.map((us, c) => c).filter((c) => collectives.exposed[c] > 0)
  .sort((a, b) => collectives.wait[a] - collectives.wait[b]);

const byParameter = parameters.name.map(() => ({ lives: [], completes: [], reductions: [], averages: [] }));
lives.forEach((life) => byParameter[life.parameter].lives.push(life));
steps.completes.forEach((names, t) => names.forEach((p) => byParameter[p].completes.push(t)));
CHANNEL.reduce.forEach((c) => collectives.members[c].forEach((p) => byParameter[p].reductions.push(c)));
CHANNEL.all_reduce.forEach((c) => collectives.members[c].forEach((p) => byParameter[p].averages.push(c)));

const state = { focus: null, selected: null, view: [0, finish], unit: "bytes", off: new Set(), pointer: null };

// The first index at which the sorted row exceeds the value.
function after(row, value, get = (i) => row[i], length = row.length) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (get(middle) > value) high = middle; else low = middle + 1;
  }
  return low;
}
const momentAt = (us) => Math.max(after(moments.time, us) - 1, 0);
const total = (m) => KINDS.bytes.reduce((sum, kind) => sum + MEMORY.bytes[kind][m], 0);
const collectiveName = (c) => `${channelOf(c).replace("_", " ")} ${collectives.bucket[c]}`;
const stepName = (t) => `step ${t} ${steps.name[t]}`;
const plural = (n, noun) => `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;

// When a selected thing is, from and to.
function extent(item) {
  if (item.kind === "step") return [steps.start[item.index], steps.end[item.index]];
  if (item.kind === "moment") return [moments.time[item.index], moments.time[item.index]];
  return [Math.min(collectives.launch[item.index], collectives.start[item.index]), collectives.end[item.index]];
}

// All that happens to a parameter, in order of time.
function events(p) {
  const { lives: rows, completes, reductions, averages } = byParameter[p], found = [];
  const add = (time, what, color, item) => found.push({ time, what, color, item });
  for (const life of rows) {
    if (life.gather === null) add(0, "carried over from the micro-batch before", "gather", { kind: "moment", index: 0 });
    else {
      const item = { kind: "collective", index: life.gather };
      add(collectives.launch[life.gather], `${collectiveName(life.gather)} is launched`, "gather", item);
      add(collectives.end[life.gather], `${collectiveName(life.gather)} arrives`, "gather", item);
    }
    for (const t of life.reads) add(steps.start[t], `read by ${stepName(t)}`, PHASES[steps.phase[t]], { kind: "step", index: t });
    if (life.end < numMoments) add(moments.time[life.end], `released, ${bytes(parameters.bytes[p])} free`, "turn", { kind: "moment", index: life.end });
  }
  for (const t of completes) add(steps.end[t], `gradient complete after ${stepName(t)}`, PHASES[steps.phase[t]], { kind: "step", index: t });
  for (const c of [...reductions, ...averages]) {
    const item = { kind: "collective", index: c };
    add(collectives.launch[c], `${collectiveName(c)} is launched`, channelOf(c), item);
    add(collectives.end[c], `${collectiveName(c)} arrives`, channelOf(c), item);
  }
  return found.map((event, order) => ({ ...event, order })).sort((a, b) => a.time - b.time || a.order - b.order);
}

// ------------------------------------------------------------------------------------------------------- words and nodes

function bytes(n) {
  if (n < 1024) return `${n} B`;
  let power = 1;
  while (power < 5 && n * 20 >= 20479 * 1024 ** power) power++;
  return `${(n / 1024 ** power).toFixed(1)} ${["KiB", "MiB", "GiB", "TiB", "PiB"][power - 1]}`;
}
function count(n) {
  const power = n < 1e4 ? 0 : Math.min(Math.floor(Math.log10(n) / 3), 4);
  return power ? `${+(n / 1000 ** power).toFixed(2)} ${["", "K", "M", "G", "T"][power]}` : n.toLocaleString("en-US");
}
function time(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return `${(us / 1e6).toFixed(3)} s`;
  if (size >= 1e3) return `${(us / 1e3).toFixed(3)} ms`;
  return `${size ? us.toFixed(size >= 100 ? 1 : 2) : 0} us`;
}
const exactBytes = (n) => `${n.toLocaleString("en-US")} B`;
const exactTime = (us) => `${us} us`;

function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "color") node.style.background = `var(--${value})`;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
// A dotted name that breaks after its dots and underscores.
const nameNode = (name) => h("span", {}, name.split(/(?<=[._])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part])));
const byteNode = (n) => h("data", { value: n, title: exactBytes(n) }, bytes(n));
const timeNode = (us) => h("data", { value: us, title: exactTime(us) }, time(us));
const countNode = (n) => h("data", { value: n }, n.toLocaleString("en-US"));
const exactByteNode = (n) => [byteNode(n), n >= 1024 ? h("span", { class: "exact" }, exactBytes(n)) : null];
const exactTimeNode = (us) => [timeNode(us), Math.abs(us) >= 1000 ? h("span", { class: "exact" }, `${us.toLocaleString("en-US", { maximumFractionDigits: 3 })} us`) : null];
const facts = (rows) => h("dl", { class: "facts" }, rows.filter(Boolean).map(([name, ...value]) => [h("dt", {}, name), h("dd", {}, ...value)]).flat());
const tag = (color, text) => h("span", { class: "tag", color }, text);
const whyNode = (why) => h("ul", { class: "why" }, why.map((line) => h("li", { class: line.startsWith("Exposed") ? "exposed" : line.startsWith("Hidden") ? "hidden-time" : null }, line)));

// A list that shows its first rows, and more on demand: long lists must not fill the page with nodes.
function list(tagName, className, rows, draw, size = 60) {
  const node = h(tagName, { class: className });
  const more = (from) => {
    rows.slice(from, from + size).forEach((row) => node.append(draw(row)));
    const left = rows.length - from - size;
    if (left > 0) {
      const button = h("button", { type: "button", onclick: () => { last.remove(); more(from + size); } }, `${plural(left, "more")}`.replace("mores", "more"));
      const last = tagName === "ul" || tagName === "ol" ? h("li", {}, button) : button;
      node.append(last);
    }
  };
  more(0);
  return node;
}
const names = (rows, size) => list("div", "names", rows, (p) => h("button", { type: "button", onclick: () => find(p) }, nameNode(parameters.name[p]), size ? byteNode(size[p]) : null), 25);

function speak(text) {
  document.getElementById("spoken").textContent = text;
}

// ------------------------------------------------------------------------------------------------------------ the head

function drawHead() {
  const $ = (id) => document.getElementById(id);
  const numForward = steps.phase.split("f").length - 1, numBackward = steps.phase.split("b").length - 1;
  $("summary").append(
    `${plural(data.world_size, "rank")}, ${plural(parameters.name.length, "parameter")}, `,
    `${plural(numForward, "forward step")}, ${numBackward.toLocaleString("en-US")} backward`, data.window === "only" ? "" : `, ${data.window} micro-batch`,
  );
  const card = (name, title, unit, note, button) => {
    const { achieved, bound, binds, ratio } = certificate[name];
    const number = unit === "bytes" ? byteNode : timeNode;
    return h("div", { class: "card", id: `card-${name}` },
      h("h2", {}, title, button || ""),
      h("div", { class: "figure" }, number(achieved)),
      h("div", { class: "meter", role: "img", "aria-label": `bound over achieved: ${achieved ? (100 * bound / achieved).toFixed(1) : 100} %` }, meter(achieved ? bound / achieved : 1, achieved <= 1.1 * bound ? "" : "far")),
      h("p", { title: `bound: ${binds}${note ? `; ${note}` : ""}` },
        ratio === null ? "no bound" : h("span", { class: ratio <= 1.1 ? "ratio" : "ratio far" }, h("data", { value: ratio, title: String(ratio) }, ratio.toFixed(3)), "\u00d7"), " the bound ", number(bound), `: ${binds}`, note ? `; ${note}` : ""));
  };
  const meter = (part, className) => {
    const bar = h("i", { class: className });
    bar.style.width = `${100 * Math.min(Math.max(part, 0), 1)}%`;
    return bar;
  };
  const limit = limits.memory_budget;
  const use = limit === null ? "" : `${(100 * certificate.peak.achieved / limit).toFixed(1)} % of memory_budget`;
  const part = totals.finish_us ? totals.exposed_us / totals.finish_us : 0;
  const go = (id, text, label, act) => h("button", { type: "button", id, title: label, "aria-label": label, onclick: act }, text);
  $("certificate").append(
    card("time", "Step time", "us", ""),
    card("volume", "Gathered on each rank", "bytes", ""),
    card("peak", "Peak memory", "bytes", use, marks.peak === null ? "" : go("to-peak", "show", "Go to the peak", () => select({ kind: "moment", index: marks.peak }, true))),
    h("div", { class: "card", id: "card-exposed" },
      h("h2", {}, "Exposed communication", stalls.length ? go("to-stall", "next", "Next stall (e)", () => nextStall(1)) : ""),
      h("div", { class: "figure" }, timeNode(totals.exposed_us)),
      h("div", { class: "meter", role: "img", "aria-label": `${(100 * part).toFixed(1)} % of the step` }, meter(part, "bad")),
      h("p", {}, `${(100 * part).toFixed(2)} % of the step, in ${plural(stalls.length, "stall")}; compute `, timeNode(totals.compute_us), ", launches ", timeNode(totals.overhead_us))),
  );
  const legend = $("legend");
  KINDS.bytes.forEach((kind) => legend.append(h("button", { type: "button", "aria-pressed": "true", "data-kind": kind, title: `Show or hide ${kind}`,
    onclick: () => { if (state.off.has(kind)) state.off.delete(kind); else state.off.add(kind); draw(); } }, h("i", { color: kind }), kind)));
  legend.append(h("button", { type: "button", id: "unit", title: "Bytes or elements (m)", onclick: toggleUnit }, "bytes"));
}

function toggleUnit() {
  state.unit = state.unit === "bytes" ? "elements" : "bytes";
  draw();
  speak(`memory in ${state.unit}`);
}

// ------------------------------------------------------------------------------------------------------------- details

function drawDetails() {
  const sections = [];
  if (state.selected) sections.push(selectedSection(state.selected));
  if (state.focus !== null) sections.push(lifeSection(state.focus));
  if (!sections.length) sections.push(overviewSection());
  const details = document.getElementById("details");
  details.replaceChildren(...sections);
  details.scrollTop = 0;
}
const closeButton = (act, what) => h("button", { type: "button", title: "Close (Esc)", "aria-label": `Close ${what}`, onclick: act }, "\u00d7");

const memoryFacts = (m) => [
  ["parameters", ...exactByteNode(moments.parameters[m])], ["packing", ...exactByteNode(moments.packing[m])],
  ...(data.reshard_to ? [["secondary shards", ...exactByteNode(moments.secondary[m])]] : []),
  ["gradients", ...exactByteNode(moments.gradients[m])], ["activations", ...exactByteNode(moments.activations[m])],
  ["shards", ...exactByteNode(data.shards)], ["in all", ...exactByteNode(total(m))],
  ["live elements", countNode(moments.live_elements[m] + moments.packing_elements[m])],
];
function where(m) {
  const point = moments.point[m], kind = { s: "during", g: "after a gather before", w: "after a wait before", r: "after a release before", d: "after a reduction is launched before", e: "after a reduction before", a: "after an all-reduce is launched before", f: "after an all-reduce before", h: "after a reshard before" }[moments.kind[m]];
  return point < numSteps ? `${kind} ${stepName(point)}` : `${kind.replace(/before$/, "after")} the last step`;
}

function overviewSection() {
  const volume = (rows) => rows.reduce((sum, c) => sum + collectives.bytes[c], 0);
  const sum = (row) => row.reduce((a, b) => a + b, 0);
  const peaks = [["peak", "peak"], ["forward_end", "end of forward"], ["backward_end", "end of backward"]].filter(([name]) => marks[name] !== null);
  const go = ([name, title]) => h("th", { scope: "col" }, h("button", { type: "button", title: where(marks[name]), onclick: () => select({ kind: "moment", index: marks[name] }, true) }, title));
  const held = (kind, of) => h("tr", { "data-kind": kind }, h("th", { scope: "row" }, kind), peaks.map(([name]) => h("td", { "data-mark": name }, byteNode(of(marks[name])))));
  return h("section", { id: "overview" },
    h("h2", {}, "Overview"),
    facts([
      ["step time", ...exactTimeNode(totals.finish_us)], ["compute", ...exactTimeNode(totals.compute_us)],
      ["launches", ...exactTimeNode(totals.overhead_us)], ["exposed", ...exactTimeNode(totals.exposed_us)],
      ["gathers", countNode(CHANNEL.gather.length)], ["gathered", ...exactByteNode(volume(CHANNEL.gather))],
      ["reductions", countNode(CHANNEL.reduce.length)], ["reduced", ...exactByteNode(volume(CHANNEL.reduce))],
      ...(CHANNEL.all_reduce.length ? [["all-reduces", countNode(CHANNEL.all_reduce.length)], ["all-reduced", ...exactByteNode(volume(CHANNEL.all_reduce))]] : []),
      ["parameters", ...exactByteNode(sum(parameters.bytes))],
      ["max_live_parameters", countNode(limits.max_live_parameters)],
      ["memory_budget", ...(limits.memory_budget === null ? ["none"] : exactByteNode(limits.memory_budget))],
    ]),
    peaks.length ? [h("h3", {}, "Most that is held"), h("table", {}, h("thead", {}, h("tr", {}, h("td", {}), peaks.map(go))),
      h("tbody", {}, KINDS.bytes.map((kind) => held(kind, (m) => MEMORY.bytes[kind][m])), held("in all", total)))] : [],
    h("h3", {}, "Assumed"),
    h("p", {}, `Durations are fixed, memory is taken at the launch, and compute is not slowed down by communication. Costs: ${data.costs}.`),
    h("p", {}, "Press ", h("kbd", {}, "/"), " to find a parameter, ", h("kbd", {}, "?"), " for all keys."));
}

function selectedSection({ kind, index }) {
  const close = closeButton(() => select(null), "the selection");
  if (kind === "step") {
    const phase = PHASES[steps.phase[index]], m = runsAt[index];
    return h("section", { id: "selected" },
      h("h2", {}, tag(phase, phase), nameNode(`${index} ${steps.name[index]}`), close),
      facts([
        data.ops[steps.op[index]] ? ["operator", data.ops[steps.op[index]]] : null,
        ["starts", ...exactTimeNode(steps.start[index])], ["takes", ...exactTimeNode(steps.end[index] - steps.start[index])],
      ]),
      steps.reads[index].length ? [h("h3", {}, "Reads"), names(steps.reads[index], parameters.bytes)] : [],
      steps.completes[index].length ? [h("h3", {}, "Completes the gradients of"), names(steps.completes[index], parameters.grad_bytes)] : [],
      h("h3", {}, "Held while it runs"), facts(memoryFacts(m)));
  }
  if (kind === "collective") {
    const channel = channelOf(index), members = collectives.members[index];
    const waited = collectives.waited_at[index];
    return h("section", { id: "selected" },
      h("h2", {}, tag(channel, { gather: "all-gather", reduce: "reduce-scatter", all_reduce: "all-reduce" }[channel]), h("span", {}, `bucket ${collectives.bucket[index]}`), close),
      whyNode(collectives.why[index]),
      facts([
        ["bytes", ...exactByteNode(collectives.bytes[index])], ["launched", ...exactTimeNode(collectives.launch[index])],
        ["starts", ...exactTimeNode(collectives.start[index])], ["arrives", ...exactTimeNode(collectives.end[index])],
        ["takes", ...exactTimeNode(collectives.end[index] - collectives.start[index])],
        waited === null ? null : ["asked for", ...exactTimeNode(collectives.wait[index])], ["exposed", ...exactTimeNode(collectives.exposed[index])],
      ]),
      h("h3", {}, `${plural(members.length, "parameter")}${collectives.packed[index] ? `, ${collectives.packed[index]} packed` : ""}`),
      names(members, { gather: parameters.bytes, reduce: parameters.grad_bytes, all_reduce: parameters.across_bytes }[channel]));
  }
  const live = lives.filter((life) => life.first <= index && index < life.end).map((life) => life.parameter)
    .sort((a, b) => parameters.bytes[b] - parameters.bytes[a] || a - b);
  return h("section", { id: "selected" },
    h("h2", {}, tag("turn", "memory"), h("span", {}, where(index)), close),
    facts([["time", ...exactTimeNode(moments.time[index])], ...memoryFacts(index)]),
    h("h3", {}, `${plural(live.length, "parameter")} gathered, the largest first`), names(live, parameters.bytes));
}

function lifeSection(p) {
  const rows = events(p), { lives: intervals } = byParameter[p];
  const current = (item) => state.selected && item.kind === state.selected.kind && item.index === state.selected.index;
  return h("section", { id: "life" },
    h("h2", {}, tag("accent", "parameter"), nameNode(parameters.name[p]), closeButton(() => find(null), "the parameter")),
    facts([
      ["elements", countNode(parameters.elements[p])], ["gathered", ...exactByteNode(parameters.bytes[p])],
      parameters.grad_bytes[p] ? ["gradient", ...exactByteNode(parameters.grad_bytes[p])] : null,
    ]),
    intervals.map((life, number) => [h("h3", {}, intervals.length > 1 ? `Life ${number + 1} of ${intervals.length}` : "Life"), whyNode(life.why)]).flat(),
    h("h3", {}, plural(rows.length, "event")),
    list("ol", "events", rows, (event) => h("li", {}, h("button", { type: "button", "aria-current": current(event.item) ? "true" : null,
      onclick: () => select(event.item, true) }, h("i", { color: event.color }), h("span", {}, event.what), timeNode(event.time)))));
}

// --------------------------------------------------------------------------------------------------------------- the chart

const runsAt = []; // the moment at which each step runs
for (let m = 0; m < numMoments; m++) if (moments.kind[m] === "s") runsAt.push(m);
const phases = []; // [letter, start, end] of each run of steps of one phase
for (let t = 0; t < numSteps; t++) {
  if (phases.length && phases[phases.length - 1][0] === steps.phase[t]) phases[phases.length - 1][2] = steps.end[t];
  else phases.push([steps.phase[t], steps.start[t], steps.end[t]]);
}
const element = document.getElementById("chart");
const chart = echarts.init(element, null, { renderer: "canvas" });
const cursor = h("div", { id: "cursor", hidden: true });
const LEFT = 92, RIGHT = 18, TOP = 8, BAND = 30;
const lanesHeight = BAND * LANES.length;
let colors = {};

function readColors() {
  const probe = h("span", { hidden: true });
  document.body.append(probe);
  for (const name of ["paper", "panel", "line", "ink", "soft", "accent", "forward", "turn", "backward", "gather", "reduce", "all_reduce", "exposed", "limit", "on", ...KINDS.bytes]) {
    probe.style.color = `var(--${name})`;
    colors[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

// What maps time to pixels for a series that is being drawn, and keeps shapes near the window: canvases lose far ones.
function scale(params, api) {
  const { x: left, width } = params.coordSys, right = left + width;
  const zero = api.coord([0, 0])[0], perUs = (api.coord([finish, 0])[0] - zero) / finish;
  const x = (us) => Math.min(Math.max(zero + us * perUs, left - 3), right + 3);
  return { left, right, x, perUs, from: (left - zero) / perUs, to: (right - zero) / perUs };
}

// Calls emit(x0, x1, i, j) for rows i..j that are drawn as one: neighbours of one class that are too narrow to tell apart.
function bundle(s, first, last, start, end, kind, emit) {
  let open = null;
  for (let i = first; i < last; i++) {
    const x0 = s.x(start(i)), x1 = s.x(end(i));
    if (open && open.kind === kind(i) && x0 - open.x1 < 0.75 && x1 - open.x0 < 2.5) { open.x1 = Math.max(x1, open.x1); open.j = i; continue; }
    if (open) emit(open.x0, open.x1, open.i, open.j);
    open = { x0, x1, i, j: i, kind: kind(i) };
  }
  if (open) emit(open.x0, open.x1, open.i, open.j);
}

function renderLanes(params, api) {
  const s = scale(params, api), children = [], focus = state.focus === null ? null : byParameter[state.focus];
  const middle = (lane) => api.coord([0, lane])[1];
  const rect = (x0, x1, y, height, fill, opacity = 1, stroke = null) => children.push({
    type: "rect", shape: { x: x0, y: y - height / 2, width: Math.max(x1 - x0, 1), height }, style: { fill, opacity, stroke, lineWidth: stroke ? 2 : 0 }, silent: true,
  });
  const label = (text, x0, x1, y, fill) => {
    const from = Math.max(x0, s.left), width = Math.min(x1, s.right) - from - 8;
    if (width > 34) children.push({ type: "text", style: { text, x: from + 4, y, fill, font: "11px system-ui, sans-serif", verticalAlign: "middle", width, overflow: "truncate", ellipsis: "\u2026" }, silent: true });
  };
  const line = (points, stroke, width = 1.5, dash = null) => children.push({ type: "polyline", shape: { points }, style: { stroke, lineWidth: width, lineDash: dash, fill: null }, silent: true });
  const gap = (x0, x1) => (x1 - x0 > 4 ? 0.5 : 0); // wide neighbours stand apart
  const dim = focus ? 0.3 : 1;

  for (let lane = 0; lane < LANES.length; lane++) line([[s.left, middle(lane) + BAND / 2], [s.right, middle(lane) + BAND / 2]], colors.line, 1);
  for (const [letter, start, end] of phases) {
    if (end < s.from || start > s.to) continue;
    const name = PHASES[letter];
    rect(s.x(start), s.x(end), middle(0), 18, colors[name], 0.92);
    label(name, s.x(start), s.x(end), middle(0), colors.on);
  }
  if (data.turn !== null) turnLine(s, line, middle(0) - BAND / 2, middle(LIFE) + BAND / 2);
  const first = Math.max(after(steps.start, s.from) - 1, 0), last = after(steps.start, s.to);
  bundle(s, first, last, (t) => steps.start[t], (t) => steps.end[t], (t) => steps.phase[t], (x0, x1, i, j) => {
    rect(x0 + gap(x0, x1), x1 - gap(x0, x1), middle(1), 20, colors[PHASES[steps.phase[i]]], dim);
    if (i === j) label(steps.name[i].replace(/^(forward|backward)\./, ""), x0, x1, middle(1), focus ? colors.ink : colors.on);
  });
  if (focus) {
    const marksOf = [...focus.lives.flatMap((life) => life.reads), ...focus.completes].filter((t) => steps.end[t] >= s.from && steps.start[t] <= s.to);
    for (const t of marksOf) rect(s.x(steps.start[t]), Math.max(s.x(steps.end[t]), s.x(steps.start[t]) + 2), middle(1), 20, colors[PHASES[steps.phase[t]]], 1);
  }
  const stallsSeen = stalls.filter((c) => collectives.wait[c] <= s.to && collectives.wait[c] + collectives.exposed[c] >= s.from);
  bundle(s, 0, stallsSeen.length, (i) => collectives.wait[stallsSeen[i]], (i) => collectives.wait[stallsSeen[i]] + collectives.exposed[stallsSeen[i]], () => 0, (x0, x1, i, j) => {
    rect(x0, x1, middle(1), 20, colors.exposed, 0.9);
    if (i === j) label(`waits for ${collectiveName(stallsSeen[i])}`, x0, x1, middle(1), colors.on);
  });
  for (let lane = 2; lane < LIFE; lane++) {
    const channel = LANES[lane];
    const row = CHANNEL[channel], start = (i) => collectives.start[row[i]], end = (i) => collectives.end[row[i]];
    const from = Math.max(after(row, s.from, start) - 1, 0), to = after(row, s.to, start);
    bundle(s, from, to, start, end, (i) => isOf(row[i]), (x0, x1, i, j) => {
      const c = row[i], mine = isOf(c), opacity = focus && !mine ? dim : 1;
      rect(x0 + gap(x0, x1), Math.max(x1 - gap(x0, x1), x0 + (mine ? 2 : 1)), middle(lane), 20, colors[channel], opacity);
      if (i !== j) return;
      const bare = Math.max(collectives.start[c], collectives.end[c] - collectives.exposed[c]);
      if (collectives.exposed[c] > 0) rect(s.x(bare), x1 - gap(x0, x1), middle(lane) + 7.5, 5, colors.exposed, 1);
      const [p] = collectives.members[c], more = collectives.members[c].length - 1;
      label(`${collectives.bucket[c]}${p === undefined ? "" : ` ${parameters.name[p]}`}${more > 0 ? ` +${more}` : ""}`, x0, x1, middle(lane), opacity < 1 ? colors.ink : colors.on);
    });
  }
  if (focus) lifeLane(s, focus, middle(LIFE), rect, label); else label("search a parameter to see its life here", s.left, s.right, middle(LIFE), colors.soft);
  if (state.selected) outline(s, state.selected, middle, rect, line);
  return { type: "group", children };
}
const turnLine = (s, line, top, bottom) => line([[s.x(steps.start[data.turn]), top], [s.x(steps.start[data.turn]), bottom]], colors.soft, 1, [2, 3]);
const isOf = (c) => state.focus !== null && collectives.members[c].includes(state.focus);

function lifeLane(s, focus, y, rect, label) {
  for (const life of focus.lives) {
    const begin = moments.time[life.first], end = life.end < numMoments ? moments.time[life.end] : finish;
    if (end < s.from || begin > s.to) continue;
    const arrived = life.gather === null ? begin : Math.min(collectives.end[life.gather], end);
    rect(s.x(begin), s.x(end), y - 4, 12, colors.gather, 0.35);
    rect(s.x(arrived), s.x(end), y - 4, 12, colors.gather, 1);
    for (const t of life.reads) {
      if (steps.end[t] >= s.from && steps.start[t] <= s.to) rect(s.x(steps.start[t]), Math.max(s.x(steps.end[t]), s.x(steps.start[t]) + 2), y - 4, 12, colors[PHASES[steps.phase[t]]], 1);
    }
  }
  for (const t of focus.completes) {
    const c = focus.reductions.find((one) => collectives.launch[one] >= steps.end[t]);
    const end = c === undefined ? finish : collectives.waited_at[c] === null ? finish : moments.time[collectives.waited_at[c]];
    rect(s.x(steps.end[t]), s.x(end), y + 8, 8, colors.reduce, 0.45);
    if (c !== undefined) rect(s.x(collectives.start[c]), s.x(collectives.end[c]), y + 8, 8, colors.reduce, 1);
  }
}

// What is selected: its frame, and for a collective where it was launched and where it is asked for.
function outline(s, { kind, index }, middle, rect, line) {
  if (kind === "moment") {
    const x = s.x(moments.time[index]);
    line([[x, middle(0) - BAND / 2], [x, middle(LIFE) + BAND / 2]], colors.accent);
  } else if (kind === "step") {
    rect(s.x(steps.start[index]), s.x(steps.end[index]), middle(1), 22, null, 1, colors.accent);
  } else {
    const y = middle(LANES.indexOf(channelOf(index)));
    const launch = s.x(collectives.launch[index]), start = s.x(collectives.start[index]), end = s.x(collectives.end[index]);
    rect(start, end, y, 22, null, 1, colors.accent);
    line([[launch, middle(1) + 11], [launch, y], [start, y]], colors.accent, 1.5);
    if (collectives.waited_at[index] !== null) {
      const wait = s.x(collectives.wait[index] + collectives.exposed[index]);
      line([[end, y], [wait, y], [wait, middle(1) + 11]], colors.accent, 1.5, [3, 2]);
    }
  }
}

function renderMemory(params, api) {
  const s = scale(params, api), children = [], rows = MEMORY[state.unit];
  const kinds = KINDS[state.unit].filter((kind) => !state.off.has(kind));
  const y = (value) => api.coord([0, value])[1], bottom = y(0);
  const sum = (m) => kinds.reduce((all, kind) => all + rows[kind][m], 0);
  const first = Math.max(after(moments.time, s.from) - 1, 0), last = after(moments.time, s.to);
  const chosen = [], at = []; // of each pixel the highest moment, a pixel wide, then the last one
  const add = (m, x) => { chosen.push(m); at.push(Math.max(x, at.length ? at[at.length - 1] : x)); };
  for (let m = first; m < last;) {
    const begin = s.x(moments.time[m]), column = Math.floor(begin);
    let high = m, end = m;
    for (; m < last && Math.floor(s.x(moments.time[m])) === column; m++) {
      if (sum(m) > sum(high)) high = m;
      end = m;
    }
    add(high, begin);
    if (end !== high) add(end, begin + 1);
  }
  if (chosen.length) {
    let floor = chosen.map(() => bottom), held = chosen.map(() => 0);
    for (const kind of kinds) {
      held = held.map((amount, i) => amount + rows[kind][chosen[i]]);
      const ceiling = held.map(y);
      const edge = (heights) => at.flatMap((x, i) => [[x, heights[i]], [i + 1 < at.length ? at[i + 1] : s.x(finish), heights[i]]]);
      children.push({ type: "polygon", shape: { points: [...edge(ceiling), ...edge(floor).reverse()] }, style: { fill: colors[kind] }, silent: true });
      floor = ceiling;
    }
  }
  const line = (points, stroke, lineWidth, lineDash) => children.push({ type: "polyline", shape: { points }, style: { stroke, lineWidth, lineDash, fill: null }, silent: true });
  if (data.turn !== null) turnLine(s, line, params.coordSys.y, bottom);
  for (const { value, name, unit } of limitLines()) {
    const height = y(value), text = { text: `${name} ${unit}`, x: s.right - 6, fill: colors.limit, font: "600 11px system-ui, sans-serif", align: "right", backgroundColor: colors.paper, padding: [1, 4], borderRadius: 3 };
    if (value <= scaleOfMemory().max) {
      line([[s.left, height], [s.right, height]], colors.limit, 1.5, [6, 3]);
      children.push({ type: "text", style: { ...text, y: height - 3, verticalAlign: "bottom" }, silent: true });
    } else children.push({ type: "text", style: { ...text, text: `\u2191 ${text.text}`, y: params.coordSys.y + 3, verticalAlign: "top" }, silent: true });
  }
  if (state.selected) {
    const x = s.x(extent(state.selected)[0]);
    line([[x, params.coordSys.y], [x, bottom]], colors.accent, 1.5, null);
  }
  return { type: "group", children };
}

// The limits on what the memory chart now shows. In bytes max_live_parameters is a line only where all elements are of one size.
function limitLines() {
  if (state.unit === "elements") return [{ name: "max_live_parameters", value: limits.max_live_parameters, unit: count(limits.max_live_parameters) }];
  if (limits.memory_budget !== null) return [{ name: "memory_budget", value: limits.memory_budget, unit: bytes(limits.memory_budget) }];
  const sizes = new Set(parameters.elements.map((n, p) => (n ? parameters.bytes[p] / n : null)).filter((size) => size !== null));
  if (sizes.size !== 1) return [];
  const value = limits.max_live_parameters * [...sizes][0];
  return [{ name: "parameters + packing: max_live_parameters", value, unit: bytes(value) }];
}

// The memory axis: up to the highest state, or the limit where that is not far above, in ticks that are round in its unit.
let memoryScale = null;
function scaleOfMemory() {
  const key = `${state.unit} ${[...state.off].sort()}`;
  if (memoryScale && memoryScale.key === key) return memoryScale;
  const rows = KINDS[state.unit].filter((kind) => !state.off.has(kind)).map((kind) => MEMORY[state.unit][kind]);
  let highest = 0;
  for (let m = 0; m < numMoments; m++) highest = Math.max(highest, rows.reduce((sum, row) => sum + row[m], 0));
  for (const { value } of limitLines()) if (value <= 1.6 * highest) highest = Math.max(highest, value);
  highest = Math.max(highest * 1.06, 1);
  const rough = highest / 5;
  const decade = 10 ** Math.floor(Math.log10(rough));
  const interval = state.unit === "bytes" ? 2 ** Math.round(Math.log2(rough)) : [1, 2, 5, 10].map((n) => n * decade).find((n) => n >= rough);
  memoryScale = { key, interval, max: highest };
  return memoryScale;
}

// Time on the axis, with as many digits as neighbouring labels need to differ.
function axisTime(us) {
  const [from, to] = state.view, [unit, size] = to >= 1e6 ? ["s", 1e6] : to >= 1e3 ? ["ms", 1e3] : ["us", 1];
  const digits = Math.min(Math.max(Math.ceil(-Math.log10((to - from) / size / 8)), 0), 9);
  return `${(us / size).toFixed(digits)} ${unit}`;
}

function options() {
  const axis = { axisLine: { lineStyle: { color: colors.line } }, axisTick: { show: false }, splitLine: { lineStyle: { color: colors.line, opacity: 0.55 } } };
  const { max, interval } = scaleOfMemory();
  const text = { color: colors.soft, fontSize: 11.5 };
  const shadow = [];
  const every = Math.max(1, Math.floor(numMoments / 500));
  for (let m = 0; m < numMoments; m += every) {
    let high = m;
    for (let k = m; k < Math.min(m + every, numMoments); k++) if (total(k) > total(high)) high = k;
    shadow.push([moments.time[high], total(high)]);
  }
  return {
    animation: false, backgroundColor: "transparent",
    grid: [{ left: LEFT, right: RIGHT, top: TOP, height: lanesHeight }, { left: LEFT, right: RIGHT, top: TOP + lanesHeight + 12, bottom: 66 }],
    xAxis: [
      { ...axis, type: "value", gridIndex: 0, min: 0, max: finish, axisLabel: { show: false }, axisLine: { show: false } },
      { ...axis, type: "value", gridIndex: 1, min: 0, max: finish, axisLabel: { ...text, formatter: axisTime, hideOverlap: true, showMinLabel: false, showMaxLabel: false } },
    ],
    yAxis: [
      { ...axis, type: "category", gridIndex: 0, inverse: true, data: LANES, splitLine: { show: false }, axisLine: { show: false }, axisLabel: { ...text, fontSize: 12.5, color: colors.ink } },
      { ...axis, type: "value", gridIndex: 1, min: 0, max, interval, axisLabel: { ...text, showMaxLabel: false, formatter: (value) => (state.unit === "bytes" ? bytes(Math.round(value)) : count(value)) } },
      { type: "value", gridIndex: 1, show: false, min: 0 },
    ],
    dataZoom: [
      { id: "inside", type: "inside", xAxisIndex: [0, 1], filterMode: "none", zoomOnMouseWheel: true, moveOnMouseMove: true, moveOnMouseWheel: "shift", minSpan: 1e-6, throttle: 16 },
      {
        id: "slider", type: "slider", xAxisIndex: [0, 1], filterMode: "none", height: 26, bottom: 8, left: LEFT, right: RIGHT, showDetail: false, brushSelect: false, minSpan: 1e-6,
        borderColor: colors.line, fillerColor: "rgba(128,140,160,0.18)", handleStyle: { color: colors.paper, borderColor: colors.soft }, moveHandleStyle: { color: colors.line },
        dataBackground: { lineStyle: { color: colors.activations, opacity: 0.9 }, areaStyle: { color: colors.activations, opacity: 0.35 } },
        selectedDataBackground: { lineStyle: { color: colors.activations }, areaStyle: { color: colors.activations, opacity: 0.7 } },
        emphasis: { handleStyle: { borderColor: colors.accent }, moveHandleStyle: { color: colors.soft } },
      },
    ],
    series: [
      { id: "shadow", type: "line", xAxisIndex: 1, yAxisIndex: 2, data: shadow, step: "end", showSymbol: false, silent: true, lineStyle: { width: 0 }, emphasis: { disabled: true } },
      { id: "lanes", type: "custom", xAxisIndex: 0, yAxisIndex: 0, renderItem: renderLanes, data: [[0, 0]], clip: true, silent: true },
      { id: "memory", type: "custom", xAxisIndex: 1, yAxisIndex: 1, renderItem: renderMemory, data: [[0, 0]], clip: true, silent: true },
    ],
  };
}

function draw() {
  for (const button of document.querySelectorAll("#legend [data-kind]")) {
    button.setAttribute("aria-pressed", String(!state.off.has(button.dataset.kind)));
    button.hidden = !KINDS[state.unit].includes(button.dataset.kind);
  }
  document.getElementById("unit").textContent = state.unit;
  chart.setOption(options());
}
const redraw = () => chart.setOption({ series: [{ id: "lanes" }, { id: "memory" }] });

function drawView() {
  const [from, to] = state.view;
  document.getElementById("view").replaceChildren(timeNode(from), " \u2013 ", timeNode(to));
}

function show(from, to) {
  const beyond = Math.max(-from, 0) - Math.max(to - finish, 0); // what sticks out at one end is moved to the other
  const begin = Math.max(from + beyond, 0), end = Math.min(to + beyond, finish);
  chart.dispatchAction({ type: "dataZoom", dataZoomId: "inside", start: (begin / finish) * 100, end: (end / finish) * 100 });
}
const pan = (part) => { const [from, to] = state.view, by = (to - from) * part; show(from + by, to + by); };
function zoom(factor) {
  const [from, to] = state.view, at = state.pointer === null ? (from + to) / 2 : state.pointer;
  show(at - (at - from) * factor, at + (to - at) * factor);
}
const whole = () => show(0, finish);

// Brings what is selected into view: where it is too narrow to see, zooms in; where it is wider than the window, out.
function reveal(item, tight = false) {
  const [start, end] = extent(item), [from, to] = state.view, length = end - start, window_ = to - from;
  const wide = element.clientWidth || 1000, seen = (length / window_) * wide;
  if (tight || seen > wide * 0.9) { const room = Math.max(length, finish * 1e-6); show(start - room, end + room); }
  else if (seen < 3 && length > 0) show(start - 12 * length, end + 12 * length);
  else if (start < from || end > to) { const middle = (start + end) / 2; show(middle - window_ / 2, middle + window_ / 2); }
}

// --------------------------------------------------------------------------------------------------------------- selecting

function describe(item) {
  if (item.kind === "step") return `${stepName(item.index)}, ${PHASES[steps.phase[item.index]]}, ${time(steps.end[item.index] - steps.start[item.index])}`;
  if (item.kind === "moment") return `memory ${where(item.index)}: ${bytes(total(item.index))}`;
  return `${collectiveName(item.index)}, ${bytes(collectives.bytes[item.index])}. ${collectives.why[item.index].join(" ")}`;
}
function select(item, bring = false) {
  state.selected = item;
  drawDetails();
  redraw();
  if (item && bring) reveal(item);
  speak(item ? describe(item) : "nothing selected");
}
function find(p) {
  state.focus = p;
  state.selected = null;
  drawDetails();
  redraw();
  if (p === null) return speak("no parameter");
  const row = events(p);
  if (row.length) {
    const [start, end] = [row[0].time, row[row.length - 1].time], room = Math.max((end - start) * 0.06, finish * 1e-4);
    show(start - room, end + room);
  }
  return speak(`${parameters.name[p]}: ${plural(row.length, "event")}`);
}
function sameItem(a, b) { return a && b && a.kind === b.kind && a.index === b.index; }

// The next or previous event: of the parameter that was looked for, else of the row that the selection stands in.
function walk(by) {
  let row;
  if (state.focus !== null) row = events(state.focus).map((event) => event.item).filter((item, i, all) => !sameItem(item, all[i - 1]));
  else if (state.selected && state.selected.kind === "step") { const index = Math.min(Math.max(state.selected.index + by, 0), numSteps - 1); return select({ kind: "step", index }, true); }
  else row = collectives.start.map((_, index) => ({ kind: "collective", index })).sort((a, b) => collectives.start[a.index] - collectives.start[b.index]);
  if (!row.length) return undefined;
  const here = state.selected && row.findIndex((item) => sameItem(item, state.selected));
  let place;
  if (here !== null && here >= 0) place = here + by;
  else {
    const at = state.selected ? extent(state.selected)[0] : state.view[0];
    place = by > 0 ? row.findIndex((item) => extent(item)[0] >= at) : row.length - 1;
  }
  return select(row[Math.min(Math.max(place, 0), row.length - 1)], true);
}
function nextStall(by) {
  if (!stalls.length) return speak("nothing is exposed");
  const here = state.selected && state.selected.kind === "collective" ? stalls.indexOf(state.selected.index) : -1;
  const at = state.selected ? extent(state.selected)[0] : state.view[0];
  let place = here >= 0 ? here + by : stalls.findIndex((c) => collectives.wait[c] + collectives.exposed[c] >= at);
  if (place < 0 || place >= stalls.length) place = by > 0 ? 0 : stalls.length - 1;
  return select({ kind: "collective", index: stalls[place] }, true);
}

// What is under a point of the chart, found in the data and not among what was drawn.
function pick(x, y) {
  if (chart.containPixel({ gridIndex: 1 }, [x, y])) return { kind: "moment", index: momentAt(chart.convertFromPixel({ xAxisIndex: 1 }, x)) };
  if (!chart.containPixel({ gridIndex: 0 }, [x, y])) return null;
  const us = chart.convertFromPixel({ xAxisIndex: 0 }, x), lane = Math.min(Math.max(Math.floor((y - TOP) / BAND), 0), LANES.length - 1);
  const near = ((state.view[1] - state.view[0]) / Math.max(element.clientWidth - LEFT - RIGHT, 1)) * 3;
  const nearest = (row, start, end, wrap) => {
    const place = after(row, us, start, row.length);
    const found = [place - 1, place].filter((i) => i >= 0 && i < row.length)
      .map((i) => [Math.max(start(i) - us, us - end(i), 0), i]).sort((a, b) => a[0] - b[0])[0];
    return found && found[0] <= near ? wrap(found[1]) : null;
  };
  if (lane === 1) {
    const stall = stalls.find((c) => collectives.wait[c] <= us && us <= collectives.wait[c] + collectives.exposed[c]);
    if (stall !== undefined) return { kind: "collective", index: stall };
    return nearest(steps.start, (i) => steps.start[i], (i) => steps.end[i], (index) => ({ kind: "step", index }));
  }
  if (lane > 1 && lane < LIFE) {
    const row = CHANNEL[LANES[lane]];
    return nearest(row, (i) => collectives.start[row[i]], (i) => collectives.end[row[i]], (i) => ({ kind: "collective", index: row[i] }));
  }
  if (lane === LIFE && state.focus !== null) {
    const life = byParameter[state.focus].lives.find((one) => moments.time[one.first] <= us + near && us - near <= (one.end < numMoments ? moments.time[one.end] : finish));
    return life ? { kind: "life", index: state.focus, life } : null;
  }
  return null;
}

const tip = document.getElementById("tip");
function tipContent(item) {
  const { kind, index } = item;
  if (kind === "life") return [h("b", {}, parameters.name[index]), facts([["gathered", byteNode(parameters.bytes[index])]]), item.life.why.map((line) => h("p", {}, line))];
  if (kind === "step") {
    const reads = steps.reads[index].map((p) => parameters.name[p]), op = data.ops[steps.op[index]];
    return [h("b", {}, stepName(index)), facts([
      op ? ["operator", op] : null, ["takes", timeNode(steps.end[index] - steps.start[index])], ["starts", timeNode(steps.start[index])],
      ["held", byteNode(total(runsAt[index]))],
      reads.length ? ["reads", reads.slice(0, 3).join(", ") + (reads.length > 3 ? ` +${reads.length - 3}` : "")] : null,
    ])];
  }
  if (kind === "moment") {
    return [h("b", {}, where(index)), facts([
      ["time", timeNode(moments.time[index])],
      ...(state.unit === "bytes" ? [...KINDS.bytes.slice().reverse().map((name) => [name, byteNode(MEMORY.bytes[name][index])]), ["in all", byteNode(total(index))]]
        : [...KINDS.elements.slice().reverse().map((name) => [name, countNode(MEMORY.elements[name][index])]), ["in all", countNode(moments.live_elements[index] + moments.packing_elements[index])]]),
    ])];
  }
  const members = collectives.members[index];
  return [h("b", {}, `${collectiveName(index)}: ${members.slice(0, 2).map((p) => parameters.name[p]).join(", ")}${members.length > 2 ? ` +${members.length - 2}` : ""}`), facts([
    ["bytes", byteNode(collectives.bytes[index])], ["takes", timeNode(collectives.end[index] - collectives.start[index])],
    ["starts", timeNode(collectives.start[index])], ["exposed", timeNode(collectives.exposed[index])],
  ]), collectives.why[index].map((line) => h("p", {}, line))];
}
function hideTip() { tip.hidden = true; cursor.hidden = true; state.pointer = null; }
function hover(event) {
  const { offsetX: x, offsetY: y } = event, inside = [0, 1].some((gridIndex) => chart.containPixel({ gridIndex }, [x, y]));
  if (!inside) return hideTip();
  state.pointer = chart.convertFromPixel({ xAxisIndex: 1 }, x);
  Object.assign(cursor.style, { left: `${x}px`, top: `${TOP}px`, height: `${element.clientHeight - TOP - 66}px` });
  cursor.hidden = false;
  const item = pick(x, y);
  tip.hidden = !item;
  if (!item) return undefined;
  tip.replaceChildren(...tipContent(item).flat());
  const box = element.getBoundingClientRect(), left = box.left + x + 16, width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(left + width > innerWidth - 8 ? box.left + x - width - 16 : left, 4)}px`;
  tip.style.top = `${Math.max(Math.min(box.top + y + 14, innerHeight - height - 8), 4)}px`;
  return undefined;
}

// --------------------------------------------------------------------------------------------------------------- searching

const box = document.getElementById("search"), results = document.getElementById("results");
const lowered = { parameter: parameters.name.map((name) => name.toLowerCase()), step: steps.name.map((name) => name.toLowerCase()) };
let hits = [], active = -1;

function matches(kind, words, most) {
  const found = [];
  lowered[kind].forEach((name, index) => {
    if (words.every((word) => name.includes(word))) found.push({ kind, index, rank: name === words[0] ? -1 : name.indexOf(words[0]) === 0 ? 0 : 1 });
  });
  found.sort((a, b) => a.rank - b.rank || a.index - b.index);
  return [found.slice(0, most), Math.max(found.length - most, 0)];
}
function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return closeResults();
  const [found, more] = matches("parameter", words, 40), [others, moreSteps] = matches("step", words, 15);
  hits = [...found, ...others];
  const option = (hit, i) => h("li", { role: "option", id: `hit-${i}`, "aria-selected": "false", onmousedown: (event) => { event.preventDefault(); choose(i); } },
    h("span", {}, hit.kind === "parameter" ? parameters.name[hit.index] : stepName(hit.index)),
    h("span", {}, hit.kind === "parameter" ? bytes(parameters.bytes[hit.index]) : "step"));
  const note = (text) => h("li", { class: "note", role: "presentation" }, text);
  results.replaceChildren(
    ...found.map(option), ...(more ? [note(`${more.toLocaleString("en-US")} more parameters: type more`)] : []),
    ...others.map((hit, i) => option(hit, found.length + i)), ...(moreSteps ? [note(`${moreSteps.toLocaleString("en-US")} more steps`)] : []),
    ...(hits.length ? [] : [note("no parameter and no step has this in its name")]));
  results.hidden = false;
  box.setAttribute("aria-expanded", "true");
  activate(hits.length ? 0 : -1);
  return undefined;
}
function activate(i) {
  active = i;
  [...results.querySelectorAll("[role=option]")].forEach((node, k) => {
    node.setAttribute("aria-selected", String(k === i));
    if (k === i) node.scrollIntoView({ block: "nearest" });
  });
  if (i >= 0) box.setAttribute("aria-activedescendant", `hit-${i}`); else box.removeAttribute("aria-activedescendant");
}
function closeResults() {
  results.hidden = true;
  hits = [];
  box.setAttribute("aria-expanded", "false");
  activate(-1);
}
function choose(i) {
  const hit = hits[i];
  closeResults();
  if (!hit) return;
  element.focus({ preventScroll: true });
  if (hit.kind === "parameter") find(hit.index); else select({ kind: "step", index: hit.index }, true);
}
box.addEventListener("input", search);
box.addEventListener("focus", () => { box.select(); search(); });
box.addEventListener("blur", closeResults);
box.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    if (hits.length) activate((active + (event.key === "ArrowDown" ? 1 : hits.length - 1)) % hits.length);
  } else if (event.key === "Enter") choose(active);
  else if (event.key === "Escape") { event.preventDefault(); box.value = ""; closeResults(); element.focus({ preventScroll: true }); }
  event.stopPropagation();
});

// ---------------------------------------------------------------------------------------------------------- keys and theme

const dark = matchMedia("(prefers-color-scheme: dark)");
function toggleTheme() {
  const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  repaint();
}
function repaint() { readColors(); draw(); }
function escape_() {
  if (state.selected) select(null); else if (state.focus !== null) find(null); else hideTip();
}
const KEYS = [
  [["/"], "search a parameter or a step", () => box.focus()],
  [["ArrowLeft", "a"], "move left", () => pan(-0.2)],
  [["ArrowRight", "d"], "move right", () => pan(0.2)],
  [["+", "=", "ArrowUp", "w"], "zoom in, at the pointer", () => zoom(1 / 1.5)],
  [["-", "ArrowDown", "s"], "zoom out", () => zoom(1.5)],
  [["0", "Home"], "whole step", whole],
  [["f"], "zoom to what is selected", () => state.selected && reveal(state.selected, true)],
  [["n", "j"], "next event: of the parameter found, else collective (or step, if one is selected)", () => walk(1)],
  [["p", "k"], "previous event", () => walk(-1)],
  [["e"], "next stall", () => nextStall(1)],
  [["E"], "previous stall", () => nextStall(-1)],
  [["x"], "the peak of memory", () => marks.peak !== null && select({ kind: "moment", index: marks.peak }, true)],
  [["m"], "memory in bytes or elements", toggleUnit],
  [["t"], "light or dark", toggleTheme],
  [["Escape"], "close, unselect", escape_],
  [["?"], "these keys", () => help.showModal()],
];
const help = document.getElementById("keys");
const KEY_NAMES = { ArrowLeft: "\u2190", ArrowRight: "\u2192", ArrowUp: "\u2191", ArrowDown: "\u2193", Escape: "Esc" };
help.querySelector("dl").append(...KEYS.flatMap(([keys, what]) => [
  h("dt", {}, keys.filter((key) => key !== "=").flatMap((key, i) => [i ? " " : "", h("kbd", {}, KEY_NAMES[key] || key)])), h("dd", {}, what),
]));
addEventListener("keydown", (event) => {
  const onButton = event.target instanceof HTMLButtonElement && (event.key === "Enter" || event.key === " ");
  if (event.ctrlKey || event.metaKey || event.altKey || help.open || onButton) return;
  const found = KEYS.find(([keys]) => keys.includes(event.key));
  if (!found) return;
  event.preventDefault();
  found[2]();
});

// ------------------------------------------------------------------------------------------------------------------- begin

element.append(cursor);
chart.on("datazoom", (event) => {
  const { start, end } = event.batch ? event.batch[0] : event;
  state.view = [finish * (start / 100), finish * (end / 100)];
  drawView();
  tip.hidden = true;
});
chart.getZr().on("mousemove", hover);
chart.getZr().on("globalout", hideTip);
chart.getZr().on("click", (event) => {
  const item = pick(event.offsetX, event.offsetY);
  if (item && item.kind !== "life") select(item);
});
element.addEventListener("wheel", (event) => {
  if (Math.abs(event.deltaX) <= Math.abs(event.deltaY) || event.shiftKey) return; // a sideways swipe moves, ECharts zooms by the rest
  event.preventDefault();
  event.stopPropagation();
  pan(event.deltaX / Math.max(element.clientWidth, 1));
}, { capture: true, passive: false });
const press = (id, act) => document.getElementById(id).addEventListener("click", act);
press("theme", toggleTheme);
press("help", () => help.showModal());
press("in", () => zoom(1 / 1.5));
press("out", () => zoom(1.5));
press("whole", whole);
dark.addEventListener("change", repaint);
new ResizeObserver(() => chart.resize()).observe(element);

drawHead();
drawView();
drawDetails();
chart.on("finished", () => { document.documentElement.dataset.ready = "true"; });
repaint();
})();
