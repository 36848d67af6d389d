"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const FIRST = ["reward", "reward/*", "eval_reward", "eval_reward/*", "loss", "eval_loss",
  "mismatch/token_mult_prob_error", "probs_ratio/*", "response_length/mean", "clip/*", "entropy",
  "kl", "grad_norm", "seconds"];
const MOST_TOKENS = 40000; // drawn at once; a button draws more

/* Text of the run reaches the page by textContent alone. */
function make(name, attributes = {}, ...inside) {
  const svg = ["svg", "path", "line", "text", "circle"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside.filter((part) => part !== null));
  return made;
}
/* Signs for line ends and tabs, escapes for all else that is not printable. */
const visible = (text) => text.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5")
  .replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => c === "\n" ? c
    : "\\x" + c.codePointAt(0).toString(16).padStart(2, "0"));
const number = (value) => value === null || value === undefined ? "none"
  : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(5)));

function chart(name) {
  const points = data.curves[name], there = points.filter((p) => p[1] !== null);
  const last = points.at(-1);
  const caption = make("figcaption", {}, `${name}: ${number(last[1])}`);
  const svg = make("svg", {viewBox: "0 0 300 110", role: "img", "aria-label": name});
  const box = make("figure", {class: "chart", "data-name": name}, caption, svg);
  if (!there.length) return box;
  const ends = (at) => there.reduce(([a, b], p) => [Math.min(a, p[at]), Math.max(b, p[at])],
    [Infinity, -Infinity]);
  const [left, right] = ends(0), [low, high] = ends(1);
  const x = (step) => 5 + 290 * (right > left ? (step - left) / (right - left) : .5);
  const y = (value) => 92 - 78 * (high > low ? (value - low) / (high - low) : .5);
  let path = "", pen = "M";
  for (const [step, value] of points) {
    if (value === null) { pen = "M"; continue; }
    path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  const dot = make("circle", {r: 3, cx: x(there.at(-1)[0]), cy: y(there.at(-1)[1])});
  const rule = make("line", {x1: 0, x2: 0, y1: 12, y2: 94, visibility: "hidden"});
  svg.append(make("text", {x: 5, y: 9}, number(high)), make("text", {x: 5, y: 106},
    `${number(low)}; steps ${left} to ${right}`), make("path", {d: path}), rule, dot);
  svg.addEventListener("mousemove", (event) => {
    const area = svg.getBoundingClientRect();
    const at = 300 * (event.clientX - area.left) / area.width;
    const near = there.reduce((a, b) => Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a);
    caption.textContent = `${name}: step ${near[0]}: ${number(near[1])}`;
    dot.setAttribute("cx", x(near[0]));
    dot.setAttribute("cy", y(near[1]));
    rule.setAttribute("x1", x(near[0]));
    rule.setAttribute("x2", x(near[0]));
    rule.setAttribute("visibility", "visible");
  });
  return box;
}

function curves() {
  const names = Object.keys(data.curves).sort(), open = new Set();
  for (const d of $("curves").querySelectorAll("details[open]")) open.add(d.dataset.name);
  const first = FIRST.flatMap((wanted) => names.filter((name) => wanted.endsWith("*")
    ? name.startsWith(wanted.slice(0, -1)) : name === wanted));
  $("curves").replaceChildren(names.length ? make("div", {class: "charts card"},
    ...first.map(chart)) : make("p", {class: "card"}, "no metrics yet"));
  const rest = new Map();
  for (const name of names.filter((n) => !first.includes(n))) {
    const part = name.includes("/") ? name.split("/")[0] : "other";
    rest.set(part, [...(rest.get(part) || []), name]);
  }
  for (const [part, inside] of rest) {
    const charts = make("div", {class: "charts"});
    const details = make("details", {"data-name": part},
      make("summary", {}, `${part} (${inside.length})`), charts);
    details.addEventListener("toggle", () => {
      if (details.open && !charts.children.length) charts.append(...inside.map(chart));
    });
    details.open = open.has(part);
    $("curves").append(details);
  }
  fault(data.broken.length ? `metrics.jsonl: ${data.broken.length} line(s) cannot be read and are `
    + `left out, the first is line ${data.broken[0]}` : "");
}
function fault(text) {
  $("fault").hidden = !text;
  $("fault").textContent = text;
}

let shown = {groups: []}, asked = 0;
const step = () => data.steps[Number($("slider").value)];
const PAINT = {
  difference: (s, i) => s.engine[i] === null || s.trainer[i] === null ? null
    : signed(s.engine[i] - s.trainer[i], (d) => Math.log10(d / .001) / 3),
  advantage: (s, i) => signed(s.advantage[i], (a) => a / (shown.largest || 1)),
  probability: (s, i) => s.trainer[i] === null ? null
    : `rgba(150, 80, 220, ${(1 - Math.exp(s.trainer[i])).toFixed(3)})`,
  none: () => null,
};
const LEGEND = {
  difference: [-1, -.1, -.01, 0, .01, .1, 1].map((d) => [d, {engine: [d], trainer: [0]}]),
  advantage: [-1, -.5, 0, .5, 1].map((a) => [a, {advantage: [a]}]),
  probability: [0, .25, .5, 1].map((p) => [p, {trainer: [Math.log(p)]}]),
  none: [],
};
function signed(value, strength) {
  if (value === null || value === 0) return null;
  const alpha = Math.min(1, Math.max(0, strength(Math.abs(value)))) * .85;
  return `rgba(${value > 0 ? "235, 120, 20" : "40, 120, 235"}, ${alpha.toFixed(3)})`;
}
function token(s, i) {
  const e = s.engine[i], t = s.trainer[i];
  const span = make("span", {title: [JSON.stringify(s.pieces[i]), `engine ${number(e)}`,
    `trainer ${number(t)}`, `difference ${e === null || t === null ? "none" : number(e - t)}`,
    s.reference ? `reference ${number(s.reference[i])}` : "",
    `advantage ${number(s.advantage[i])}`].filter(Boolean).map(visible).join("\n")},
    visible(s.pieces[i]));
  if (!s.mask[i]) span.className = "unmasked";
  span.style.backgroundColor = PAINT[$("colour").value](s, i) || "";
  return span;
}
function card(s) {
  const facts = [`finish ${s.finish}`], seen = new Set(s.advantage);
  if (seen.size === 1) facts.push(`advantage ${number(s.advantage[0])}`);
  else if (seen.size) facts.push("advantage by token");
  if (s.spans.length > 1) facts.push("weights " + s.spans.map(([v, n]) => `${v}: ${n}`).join(", "));
  const rewards = Object.entries(s.rewards).map(([name, value]) => `${name} ${number(value)}`);
  return make("div", {class: "sample"},
    make("p", {}, make("b", {}, `${s.index}: reward ${number(s.reward)}`),
      ` ${rewards.join(", ")}`),
    make("p", {class: "soft"}, visible(facts.join("; "))),
    make("div", {class: "tokens"}, ...(s.pieces ? s.pieces.map((_, i) => token(s, i))
      : [visible(s.text)])));
}
function part(p) {
  if (!("image" in p)) return document.createTextNode(visible(p.text));
  const image = make("img", {src: shown.pictures[p.image], alt: "picture of the prompt"});
  image.addEventListener("click", () => image.classList.toggle("large"));
  return image;
}
function group(g) {
  const heading = visible([`group ${g.name}`, g.where,
    g.kind && (g.kind === "mixed" ? g.kind : `all ${g.kind}`),
    g.gap === null ? "" : `largest difference ${number(g.gap)}`].filter(Boolean).join("; "));
  return make("article", {class: "card", "data-kind": g.kind}, make("h3", {}, heading),
    ...g.prompt.map((turn) => make("div", {class: "said"}, make("b", {}, `${turn.role} `),
      ...turn.parts.map(part))),
    g.answer === null ? null : make("p", {class: "said"}, make("b", {}, "expected "),
      visible(g.answer)),
    make("div", {class: "samples"}, ...g.samples.map(card)));
}
function groups() {
  const kind = $("kind").value;
  let wanted = shown.groups.filter((g) => !kind || g.kind === kind);
  if ($("sort").checked) wanted = wanted.toSorted((a, b) => (b.gap ?? -1) - (a.gap ?? -1));
  $("legend").replaceChildren(...LEGEND[$("colour").value].map(([value, s]) => {
    const span = make("span", {}, ` ${number(value)} `), largest = shown.largest;
    shown.largest = 1;
    span.style.backgroundColor = PAINT[$("colour").value](s, 0) || "";
    shown.largest = largest;
    return span;
  }), $("colour").value === "advantage" ? ` x ${number(shown.largest)}` : "");
  $("groups").replaceChildren(shown.error ? make("p", {class: "card bad"}, visible(shown.error))
    : "", wanted.length || shown.error ? "" : make("p", {class: "card"}, "no such group"));
  const more = () => {
    for (let tokens = 0; wanted.length && tokens < MOST_TOKENS;) {
      const g = wanted.shift();
      tokens += g.samples.reduce((sum, s) => sum + s.engine.length, 0);
      $("groups").append(group(g));
    }
    if (!wanted.length) return;
    const button = make("button", {}, `show more of ${wanted.length} groups`);
    button.addEventListener("click", () => { button.remove(); more(); });
    $("groups").append(button);
  };
  more();
}
async function load() {
  const turn = ++asked, wanted = step();
  $("step").textContent = wanted;
  let found;
  try {
    found = data.live ? await (await fetch(`step/${wanted}`)).json()
      : {...data.data[wanted], pictures: data.pictures};
  } catch (error) {
    found = {groups: [], error: `step ${wanted} cannot be loaded: ${error.message}`};
  }
  if (turn !== asked) return; // the slider has moved on
  shown = found;
  shown.largest = shown.groups.flatMap((g) => g.samples).flatMap((s) => s.advantage)
    .reduce((a, b) => Math.max(a, Math.abs(b || 0)), 0);
  groups();
}
function steps() {
  $("bar").hidden = !data.steps.length;
  $("slider").max = Math.max(0, data.steps.length - 1);
  $("which").textContent = data.steps.length < data.total
    ? `${data.steps.length} of ${data.total} steps with rollouts: ${data.steps.join(", ")}`
    : `${data.total} steps with rollouts`;
}
async function follow() {
  try {
    const news = await (await fetch(`news?at=${data.at}`)).json();
    const current = step(), changed = news.reset || Object.keys(news.curves).length;
    if (news.reset) [data.curves, data.broken] = [{}, []];
    for (const [name, points] of Object.entries(news.curves))
      data.curves[name] = (data.curves[name] || []).concat(points);
    data.broken.push(...news.broken);
    data.at = news.at;
    if (changed || news.broken.length) curves();
    if (String(news.steps) !== String(data.steps)) {
      [data.steps, data.total] = [news.steps, news.steps.length];
      steps();
      const place = data.steps.indexOf(current);
      $("slider").value = place < 0 ? data.steps.length - 1 : place;
      if (place < 0 && data.steps.length) load();
    }
  } catch (error) {
    fault(`the server does not answer: ${error.message}`);
  }
  setTimeout(follow, 2000);
}
$("slider").addEventListener("input", load);
for (const id of ["colour", "kind", "sort"]) $(id).addEventListener("change", groups);
document.addEventListener("keydown", (event) => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!by || ["INPUT", "SELECT"].includes(event.target.tagName) || !data.steps.length) return;
  $("slider").value = Number($("slider").value) + by;
  load();
});
curves();
steps();
if (data.steps.length) {
  $("slider").value = data.steps.length - 1;
  load();
}
if (data.live) setTimeout(follow, 2000);
