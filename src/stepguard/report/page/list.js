"use strict";
// The list of runs, asked for again every few seconds. Text goes in as text only.

const EVERY_MS = 3000;

function cell(text) {
  const made = document.createElement("td");
  made.textContent = text;
  return made;
}

function show(runs) {
  const body = document.getElementById("runs");
  body.textContent = "";
  document.getElementById("none").hidden = runs.length > 0;
  for (const run of runs) {
    const row = document.createElement("tr");
    const link = document.createElement("a");
    link.href = run.address;
    link.textContent = run.name;
    const name = document.createElement("td");
    name.append(link);
    const state = cell("");
    const chip = document.createElement("span");
    chip.className = `chip ${run.weight}`;
    chip.textContent = run.state;
    state.append(chip);
    row.append(name, state, cell(run.steps), cell(run.loss), cell(run.incidents), cell(run.last));
    body.append(row);
  }
}

async function again() {
  try {
    const answer = await fetch("/runs.json");
    if (answer.ok) show((await answer.json()).runs);
  } finally {
    setTimeout(again, EVERY_MS);
  }
}

show(JSON.parse(document.getElementById("stepguard-runs").textContent).runs);
setTimeout(again, EVERY_MS);
