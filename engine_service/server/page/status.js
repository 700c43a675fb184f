// Shows who is served. Names of residents are text, never markup.
"use strict";

const byId = (id) => document.getElementById(id);
const seconds = (value) => (value === null ? "–" : `${value.toFixed(2)} s`);
const share = (value) => (value === null ? "–" : `${Math.round(value * 100)} %`);

async function ask(path, token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { headers, cache: "no-store" });
  const body = await response.json();
  if (!response.ok && body.error) throw new Error(body.error.message);
  return body;
}

function fill(id, rows) {
  const cells = (row) => {
    const line = document.createElement("tr");
    for (const value of row) line.insertCell().textContent = value;
    return line;
  };
  byId(id).replaceChildren(...rows.map(cells));
}

function show(snapshot) {
  const engine = snapshot.engine;
  const pages = `${engine.kv_pages_used} of ${engine.kv_pages_total} pages in use`;
  const met = engine.policy_met ? "the policy is met" : engine.policy_notes.join("; ");
  const bound = engine.bound_used === null ? "" : `, ${share(engine.bound_used)} of the bound of fairness used`;
  byId("now").textContent =
    `${engine.requests_running} running, ${engine.requests_waiting} waiting, ` +
    `${engine.tokens_per_second} tokens/s, ${pages}${bound}; ${met}.`;
  const paused = (name) => (engine.paused_classes.includes(name) ? `${name} (paused)` : name);
  fill("residents", Object.values(snapshot.residents).map((one) => [
    one.name, one.requests_running, one.requests_waiting, share(one.service_share),
    share(one.entitled_share), seconds(one.time_to_first_token_s.p95),
  ]));
  fill("classes", Object.entries(snapshot.classes).map(([name, one]) => [
    paused(name), one.requests_running, one.requests_waiting, one.finished,
    seconds(one.queue_time_s.p95), seconds(one.time_to_first_token_s.p95), share(one.slo_attainment),
  ]));
}

async function watch(token) {
  for (;;) {
    show(await ask("v1/fairness", token));
    byId("door").hidden = true;
    byId("household").hidden = false;
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

byId("door").addEventListener("submit", async (event) => {
  event.preventDefault();
  byId("refusal").textContent = "";
  try {
    await watch(byId("token").value.trim());
  } catch (error) {
    byId("household").hidden = true;
    byId("door").hidden = false;
    byId("refusal").textContent = error.message;
  }
});

function told(model) {
  const part = model.progress === null ? "" : ` ${Math.round(100 * model.progress)} %`;
  return `${model.id} (${model.state}${part})`;
}

async function greet() {
  try {
    const health = await ask("health");
    const ready = await fetch("ready", { cache: "no-store" });
    const { models } = await ready.json();
    const names = models.length > 1 ? models.map(told).join(", ") : health.model;
    byId("engine").textContent = `${names}; version ${health.version}: ${ready.ok ? "ready" : "not ready"}`;
    if (models.length > 1) setTimeout(greet, 2000);
  } catch (error) {
    byId("engine").textContent = `The engine does not answer: ${error.message}`;
  }
}

greet();
