// The page of `python -m bertlab.course.serve`: asks, and shows the answer. Texts are put in as
// text, never as HTML.
"use strict";
const byId = id => document.getElementById(id);
const make = (tag, text, className) =>
  Object.assign(document.createElement(tag), {textContent: text ?? "", className: className ?? ""});

let models = [];
let busy = false;

const chosen = () => {
  const checked = document.querySelector("input[name=task]:checked");
  return models.find(model => checked && model.task === checked.value);
};

const hint = () => {
  const model = chosen();
  if (!model) return;
  byId("hint").textContent = model.task === "fill-mask"
    ? `Put ${model.mask_token} where the model is to guess; at most ${model.max_tokens} tokens.`
    : `One of ${model.labels.length} classes; at most ${model.max_tokens} tokens.`;
  byId("about").textContent = `${model.model}, ${model.precision}`;
};

const showTasks = () => {
  for (const [number, model] of models.entries()) {
    const label = make("label");
    const radio = Object.assign(make("input"),
      {type: "radio", name: "task", value: model.task, checked: number === 0});
    radio.addEventListener("change", hint);
    label.append(radio, ` ${model.task}`);
    byId("tasks").append(label);
  }
  byId("tasks").hidden = models.length < 2;
  hint();
};

const table = (caption, rows) => {
  const element = make("table");
  element.append(make("caption", caption));
  for (const {name, probability} of rows) {
    const row = element.insertRow();
    row.append(Object.assign(make("th", name), {scope: "row"}));
    row.append(make("td", `${(100 * probability).toFixed(1)} %`, "number"));
    const meter = Object.assign(make("meter"), {min: 0, max: 1, value: probability});
    meter.setAttribute("aria-hidden", "true");
    row.insertCell().append(meter);
    row.lastChild.className = "bar-cell";
  }
  return element;
};

const show = answer => {
  const lists = answer.labels ? [answer.labels] : answer.masks;
  const tables = lists.map((rows, number) =>
    table(answer.labels ? "Class" : lists.length > 1 ? `Mask ${number + 1}` : "Mask", rows));
  const about = `${answer.tokens} tokens; read in a batch of ${answer.batch}; `
    + `${answer.milliseconds.toFixed(1)} ms with the wait`;
  byId("answer").replaceChildren(...tables, make("p", about, "soft"));
};

const fail = message => byId("answer").replaceChildren(make("p", message, "wrong"));

const ask = async event => {
  event?.preventDefault();
  const model = chosen();
  if (busy || !model) return;
  busy = true;
  byId("ask").setAttribute("aria-disabled", "true");
  try {
    const response = await fetch(model.path, {
      method: "POST", headers: {"Content-Type": "application/json"},
      body: JSON.stringify({text: byId("text").value})});
    const answer = await response.json();
    response.ok ? show(answer) : fail(answer.error);
  } catch (error) {
    fail(`The server does not answer: ${error.message}`);
  }
  byId("ask").removeAttribute("aria-disabled");
  busy = false;
};

byId("form").addEventListener("submit", ask);
byId("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
});
fetch("/status").then(response => response.json())
  .then(status => { models = status.models; showTasks(); })
  .catch(error => fail(`The server does not answer: ${error.message}`));
