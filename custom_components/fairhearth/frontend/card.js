/**
 * The card: who is served now, who got how much, who waits, whether all is as agreed, and the jobs.
 *
 * Shows only what Home Assistant's entities, recorder and the integration's action say; decides nothing.
 */

import { LitElement, css, html, nothing, svg } from "./vendor/lit.js";
import { NUM_BINS, readHistory, sharesOf } from "./history.js";
import { CLASSES, PLATFORM, entityIdsOf, householdOf, isAvailable, numberOf } from "./household.js";
import { pageLanguage, text } from "./texts.js";

export const PARTS = ["policy", "now", "shares", "waiting", "jobs"];
export const DEFAULT_HOURS = 24;

const LONGEST_HOURS = 168;
const HISTORY_EVERY_MS = 60_000;
const SHORT_HISTORY_EVERY_MS = 10_000;
const LANE = { width: 100, height: 30 };

const CLASS_ICONS = {
  voice: "mdi:microphone",
  accessibility: "mdi:human",
  chat: "mdi:keyboard",
  agent: "mdi:robot",
  embedding: "mdi:magnify",
  background: "mdi:weather-night",
};

export class FairhearthCard extends LitElement {
  static properties = {
    hass: { attribute: false },
    _config: { state: true },
    _history: { state: true },
    _historyError: { state: true },
  };

  // ---- what Home Assistant asks of a card

  setConfig(config) {
    const parts = config.parts ?? PARTS;
    const unknown = Array.isArray(parts) ? parts.filter((part) => !PARTS.includes(part)) : [parts];
    if (unknown.length) throw new Error(`parts: ${unknown.join(", ")}: expected some of ${PARTS.join(", ")}`);
    const hours = config.hours ?? DEFAULT_HOURS;
    if (typeof hours !== "number" || !(hours > 0 && hours <= LONGEST_HOURS)) {
      throw new Error(`hours: ${hours}: expected a number above 0 and at most ${LONGEST_HOURS}`);
    }
    this._config = { ...config, parts, hours };
    this._history = undefined;
    this._restart();
  }

  static getStubConfig() {
    return {};
  }

  static getConfigForm() {
    const say = (key) => text(pageLanguage(), key);
    const options = PARTS.map((part) => ({ value: part, label: say(part === "waiting" ? "waiting_by_class" : part) }));
    return {
      schema: [
        { name: "device", selector: { device: { filter: { integration: PLATFORM }, entity: { domain: "binary_sensor" } } } },
        { name: "parts", selector: { select: { multiple: true, mode: "list", options } } },
        { name: "hours", selector: { number: { min: 1, max: LONGEST_HOURS, mode: "box" } } },
      ],
      computeLabel: (field) => say({ device: "engine", parts: "parts", hours: "hours" }[field.name]),
    };
  }

  getCardSize() {
    return 3 * this._config.parts.length;
  }

  getGridOptions() {
    return { columns: 12, min_columns: 6, rows: "auto" };
  }

  // ---- when to look again

  connectedCallback() {
    super.connectedCallback();
    this._restart();
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    this._stop();
  }

  shouldUpdate(changed) {
    if (!this._config || !this.hass) return false;
    const old = changed.get("hass");
    if (changed.size > 1 || !changed.has("hass") || !old) return true;
    if (old.entities !== this.hass.entities || old.devices !== this.hass.devices) return true;
    if (old.locale !== this.hass.locale) return true;
    return this._watched().some((id) => old.states[id] !== this.hass.states[id]);
  }

  willUpdate() {
    this._household = householdOf(this.hass, this._config.device);
    this._ids = this._household ? entityIdsOf(this._household) : [];
    if (!this._timers && this.isConnected) this._restart();
  }

  _watched() {
    // Until a household is found, every entity is of interest.
    return this._ids?.length ? this._ids : Object.keys(this.hass.states);
  }

  _restart() {
    this._stop();
    if (!this.isConnected || !this.hass || !this._config) return;
    const { parts, hours } = this._config;
    this._timers = [];
    if (parts.includes("shares")) {
      this._every(hours > 2 ? HISTORY_EVERY_MS : SHORT_HISTORY_EVERY_MS, () => this._readHistory());
    }
  }

  _every(interval, work) {
    work();
    this._timers.push(setInterval(() => document.hidden || work(), interval));
  }

  _stop() {
    this._timers?.forEach(clearInterval);
    this._timers = undefined;
  }

  async _readHistory() {
    const household = householdOf(this.hass, this._config.device);
    const ids = (household?.residents ?? []).flatMap(({ entities }) => [
      entities["sensor.service_share"],
      entities["sensor.entitled_share"],
    ]);
    const wanted = ids.filter(Boolean);
    if (!wanted.length) return;
    try {
      this._history = await readHistory(this.hass, wanted, this._config.hours);
      this._historyError = undefined;
    } catch (error) {
      this._historyError =
        error?.code === "unknown_command"
          ? this._say("history_off")
          : this._say("history_failed", { message: error?.message ?? error });
    }
  }

  // ---- words and numbers

  _say(key, values) {
    return text(this.hass?.locale?.language ?? this.hass?.language, key, values);
  }

  _percent(share) {
    if (share === undefined) return this._say("nothing_yet");
    return new Intl.NumberFormat(this.hass.locale.language, { style: "percent", maximumFractionDigits: 0 }).format(
      share / 100,
    );
  }

  _number(value, digits) {
    return new Intl.NumberFormat(this.hass.locale.language, { maximumFractionDigits: digits }).format(value);
  }

  _clock(milliseconds) {
    const { language, time_format: format, time_zone: zone } = this.hass.locale;
    return new Intl.DateTimeFormat(language, {
      weekday: this._config.hours > 24 ? "short" : undefined,
      hour: "numeric",
      minute: "2-digit",
      hour12: format === "12" ? true : format === "24" ? false : undefined,
      timeZone: zone === "server" ? this.hass.config.time_zone : undefined,
    }).format(milliseconds);
  }

  _shown(entityId) {
    return entityId && isAvailable(this.hass, entityId) ? this.hass.formatEntityState(this.hass.states[entityId]) : "–";
  }

  // ---- what is seen

  render() {
    const draw = {
      policy: () => this._renderPolicy(),
      now: () => this._renderNow(),
      shares: () => this._renderShares(),
      waiting: () => this._renderWaiting(),
      jobs: () => this._renderJobs(),
    };
    const body = this._household
      ? this._config.parts.map((part) => draw[part]())
      : html`<p class="note">${this._say("no_engine")}</p>`;
    return html`<ha-card>${body}</ha-card>`;
  }

  _renderPolicy() {
    const id = this._household.entities["binary_sensor.policy_met"];
    const isThere = isAvailable(this.hass, id);
    const isMet = isThere && this.hass.states[id].state === "on";
    const [key, icon] = isMet
      ? ["policy_met", "mdi:scale-balance"]
      : isThere
        ? ["policy_not_met", "mdi:scale-unbalanced"]
        : ["policy_gone", "mdi:lan-disconnect"];
    const notes = isThere && !isMet ? (this.hass.states[id].attributes.notes ?? []) : [];
    return html`
      <section class="policy ${isMet ? "good" : "bad"}">
        <button class="plain" @click=${() => this._open(id)} aria-describedby="notes">
          <span class="badge"><ha-icon .icon=${icon} aria-hidden="true"></ha-icon></span>
          <span>
            <span role="status">${this._say(key)}</span>
            ${this._renderMargin()}
          </span>
        </button>
        <ul id="notes">
          ${notes.map((note) => html`<li>${this._note(note)}</li>`)}
        </ul>
      </section>
    `;
  }

  _renderMargin() {
    const used = numberOf(this.hass, this._household.entities["sensor.bound_used"]);
    if (used === undefined) return nothing;
    return html`<span class="aside margin">${this._say("margin_used", { share: this._percent(used) })}</span>`;
  }

  _isBackgroundPaused() {
    const id = this._household.entities["switch.background_paused"];
    return id !== undefined && this.hass.states[id].state === "on";
  }

  /** Say one of the engine's reasons in the reader's language; one that is not known is shown as it came. */
  _note(note) {
    const waited = /^(\w+) requests waited ([\d.]+) s; the policy allows ([\d.]+) s$/.exec(note);
    if (waited && CLASSES.includes(waited[1])) {
      return this._say("note_waited", {
        kind: this._say(`class_${waited[1]}`),
        waited: this._number(Number(waited[2]), 1),
        allowed: this._number(Number(waited[3]), 1),
      });
    }
    const ahead =
      /^(.+) was served (\d+) tokens more than (.+) while both waited; the policy allows (\d+)$/.exec(note);
    if (ahead) {
      return this._say("note_ahead", {
        ahead: ahead[1],
        served: this._number(Number(ahead[2]), 0),
        behind: ahead[3],
        allowed: this._number(Number(ahead[4]), 0),
      });
    }
    return note;
  }

  _renderNow() {
    const { entities, residents } = this._household;
    const running = numberOf(this.hass, entities["sensor.requests_running"]);
    const waiting = numberOf(this.hass, entities["sensor.requests_waiting"]);
    const speed = numberOf(this.hass, entities["sensor.tokens_per_second"]);
    return html`
      <section aria-labelledby="now">
        <header>
          <h2 id="now">${this._say("now")}</h2>
          ${speed === undefined
            ? nothing
            : html`<span class="aside">${this._say("now_tokens", { speed: this._number(speed, speed < 10 ? 1 : 0) })}</span>`}
        </header>
        ${running === undefined || waiting === undefined
          ? nothing
          : html`<p class="lead">${this._say("active", { running, waiting })}</p>`}
        ${this._isBackgroundPaused() ? html`<p class="note">${this._say("background_paused")}</p>` : nothing}
        ${residents.length
          ? html`<ul class="people">
              ${residents.map((resident) => this._renderPerson(resident))}
            </ul>`
          : html`<p class="note">${this._say("no_residents")}</p>`}
      </section>
    `;
  }

  _renderPerson({ name, color, entities, account }) {
    const running = numberOf(this.hass, entities["sensor.requests_running"]) ?? 0;
    const waiting = numberOf(this.hass, entities["sensor.requests_waiting"]) ?? 0;
    const target = entities["sensor.requests_running"] ?? entities["sensor.service_share"];
    return html`
      <li>
        <button class="plain person" style=${tint(color)} @click=${() => this._open(target)}>
          <span class="avatar ${running ? "busy" : ""}" aria-hidden="true">${avatarOf(name, account)}</span>
          <span class="name">${name}</span>
          ${running ? html`<span class="chip on">${this._say("running_count", { count: running })}</span>` : nothing}
          ${waiting ? html`<span class="chip">${this._say("waiting_count", { count: waiting })}</span>` : nothing}
          ${running || waiting ? nothing : html`<span class="rest">${this._say("idle")}</span>`}
        </button>
      </li>
    `;
  }

  _renderShares() {
    const { residents } = this._household;
    const { hours } = this._config;
    const span =
      hours < 1
        ? this._say("last_minutes", { minutes: Math.round(hours * 60) })
        : this._say("last_hours", { hours: this._number(hours, 1) });
    return html`
      <section aria-labelledby="shares">
        <header>
          <h2 id="shares">${this._say("shares")}</h2>
          <span class="aside">${span}</span>
        </header>
        ${this._historyError ? html`<p class="note" role="alert">${this._historyError}</p>` : nothing}
        ${!this._history && !this._historyError ? html`<p class="note">${this._say("loading")}</p>` : nothing}
        ${this._history ? this._renderLanes(residents) : nothing}
      </section>
    `;
  }

  _renderLanes(residents) {
    const { bins, start, end } = this._history;
    const shares = (key) =>
      sharesOf(residents.map(({ entities }) => bins[entities[`sensor.${key}`]] ?? new Array(NUM_BINS).fill(undefined)));
    const [received, entitled] = [shares("service_share"), shares("entitled_share")];
    return html`
      <ul class="lanes">
        ${residents.map((resident, index) => this._renderLane(resident, received[index], entitled[index]))}
      </ul>
      <div class="axis" aria-hidden="true"><span>${this._clock(start)}</span><span>${this._clock(end)}</span></div>
      <p class="legend" aria-hidden="true">
        <span class="swatch"></span>${this._say("received_legend")}
        <span class="dash"></span>${this._say("fair_legend")}
      </p>
      <p class="note">${this._say("shares_hint")}</p>
    `;
  }

  _renderLane(resident, received, entitled) {
    const values = {
      name: resident.name,
      received: this._percent(received.whole),
      fair: this._percent(entitled.whole),
    };
    const nothingAsked = `${resident.name}: ${this._say("asked_nothing")}`;
    return html`
      <li>
        <button
          class="plain lane"
          style=${tint(resident.color)}
          aria-label=${entitled.whole ? this._say("share_label", values) : nothingAsked}
          @click=${() => this._open(resident.entities["sensor.service_share"])}
        >
          <span class="row">
            <span class="name">${resident.name}</span>
            ${entitled.whole
              ? html`<span class="numbers">
                  <strong>${this._say("received", { share: values.received })}</strong>
                  <span>${this._say("fair", { share: values.fair })}</span>
                </span>`
              : html`<span class="rest">${this._say("asked_nothing")}</span>`}
          </span>
          <span class="gauge">
            <span class="fill" style="width:${received.whole ?? 0}%"></span>
            ${entitled.whole
              ? html`<span class="tick" style="inset-inline-start:${entitled.whole}%"></span>`
              : nothing}
          </span>
          <svg viewBox="0 0 ${LANE.width} ${LANE.height}" preserveAspectRatio="none" aria-hidden="true">
            <line class="floor" x1="0" x2=${LANE.width} y1=${LANE.height} y2=${LANE.height}></line>
            ${received.bins.map((value, index) => bar(value, index, NUM_BINS))}
            <path class="fair" d=${steps(entitled.bins)}></path>
          </svg>
        </button>
      </li>
    `;
  }

  _renderWaiting() {
    const { entities } = this._household;
    const rows = CLASSES.map((name) => ({
      name,
      waiting: entities[`sensor.requests_waiting_${name}`],
      queue: entities[`sensor.queue_time_p95_${name}`],
      first: entities[`sensor.time_to_first_token_p95_${name}`],
      inTime: entities[`sensor.slo_attainment_${name}`],
    })).filter(({ waiting, queue, first, inTime }) => waiting || queue || first || inTime);
    if (!rows.length) return nothing;
    const hasCounts = rows.some(({ waiting }) => waiting);
    const hasTargets = rows.some(({ inTime }) => inTime);
    return html`
      <section aria-labelledby="waiting">
        <header><h2 id="waiting">${this._say("waiting_by_class")}</h2></header>
        <table>
          <thead>
            <tr>
              <th scope="col">${this._say("kind")}</th>
              ${hasCounts ? html`<th scope="col">${this._say("waiting_now")}</th>` : nothing}
              <th scope="col">${this._say("waiting_time")}</th>
              <th scope="col">${this._say("first_word")}</th>
              ${hasTargets ? html`<th scope="col">${this._say("in_time")}</th>` : nothing}
            </tr>
          </thead>
          <tbody>
            ${rows.map((row) => this._renderClass(row, hasCounts, hasTargets))}
          </tbody>
        </table>
        <p class="note">${this._say("waiting_hint")}</p>
        ${hasTargets ? html`<p class="note">${this._say("in_time_hint")}</p>` : nothing}
      </section>
    `;
  }

  _renderClass({ name, waiting, queue, first, inTime }, hasCounts, hasTargets) {
    const label = this._say(`class_${name}`);
    const isPaused = name === "background" && this._isBackgroundPaused();
    return html`
      <tr>
        <th scope="row">
          <button
            class="plain kind"
            aria-label=${this._say("open", { name: label })}
            @click=${() => this._open(first ?? queue ?? waiting ?? inTime)}
          >
            <ha-icon .icon=${CLASS_ICONS[name]} aria-hidden="true"></ha-icon>${label}
          </button>
          ${isPaused ? html`<span class="chip">${this._say("paused")}</span>` : nothing}
        </th>
        ${hasCounts ? html`<td>${this._shown(waiting)}</td>` : nothing}
        <td>${this._shown(queue)}</td>
        <td>${this._shown(first)}</td>
        ${hasTargets ? html`<td>${this._shown(inTime)}</td>` : nothing}
      </tr>
    `;
  }

  _renderJobs() {
    const { "sensor.jobs": id, "event.job": ended } = this._household.entities;
    if (!id || !isAvailable(this.hass, id)) return nothing;
    const jobs = [...(this.hass.states[id].attributes.jobs ?? [])];
    if (ended && isAvailable(this.hass, ended)) jobs.push(this.hass.states[ended].attributes);
    return html`
      <section aria-labelledby="jobs">
        <header><h2 id="jobs">${this._say("jobs")}</h2></header>
        ${jobs.length ? nothing : html`<p class="note">${this._say("jobs_none")}</p>`}
        <ul class="jobs">
          ${jobs.map((job) => this._renderJob(job))}
        </ul>
      </section>
    `;
  }

  _renderJob({ job_id: id, title, state, progress, eta_s: eta, workload_class: kind }) {
    const isPaused = state === "submitted" && kind === "background" && this._isBackgroundPaused();
    const share = state === "finished" ? 100 : (progress ?? 0);
    const hasEta = state === "running" && typeof eta === "number";
    const values = { share: this._percent(share), seconds: hasEta ? this._number(eta, 0) : "" };
    const how = isPaused ? this._say("paused") : this._say(`job_${state}${hasEta ? "_eta" : ""}`, values);
    const label = title || id;
    return html`
      <li>
        <span class="row"><span class="name">${label}</span><span class="rest">${how}</span></span>
        <span
          class="progress ${state}"
          role="progressbar"
          aria-label=${label}
          aria-valuemin="0"
          aria-valuemax="100"
          aria-valuenow=${share}
          aria-valuetext=${how}
          ><span style="width:${share}%"></span
        ></span>
      </li>
    `;
  }

  _open(entityId) {
    if (!entityId) return;
    const detail = { entityId };
    this.dispatchEvent(new CustomEvent("hass-more-info", { detail, bubbles: true, composed: true }));
  }

  static styles = css`
    ha-card {
      padding: 16px;
      display: flex;
      flex-direction: column;
      gap: 24px;
      color: var(--primary-text-color);
    }
    section {
      min-width: 0;
    }
    header,
    .row {
      display: flex;
      flex-wrap: wrap;
      align-items: baseline;
      justify-content: space-between;
      gap: 2px 12px;
    }
    h2 {
      margin: 0;
      font-size: var(--ha-font-size-l, 16px);
      font-weight: var(--ha-font-weight-medium, 500);
      line-height: 24px;
    }
    ul {
      list-style: none;
      margin: 0;
      padding: 0;
    }
    p {
      margin: 4px 0 0;
    }
    .aside,
    .note,
    .rest,
    .lead,
    .legend,
    .axis,
    .numbers > span {
      color: var(--secondary-text-color);
      font-size: var(--ha-font-size-s, 12px);
      line-height: 18px;
      font-variant-numeric: tabular-nums;
    }
    .plain {
      all: unset;
      box-sizing: border-box;
      cursor: pointer;
      border-radius: 8px;
      -webkit-tap-highlight-color: transparent;
    }
    .plain:hover {
      background: color-mix(in srgb, var(--primary-text-color) 5%, transparent);
    }
    .plain:focus-visible {
      outline: 2px solid var(--primary-color);
      outline-offset: 2px;
    }

    .policy {
      --tone: var(--success-color, #43a047);
      margin: -4px;
      padding: 4px;
      border-radius: 12px;
      background: color-mix(in srgb, var(--tone) 12%, transparent);
    }
    .policy.bad {
      --tone: var(--warning-color, #ffa600);
    }
    .policy .plain {
      display: flex;
      align-items: center;
      gap: 12px;
      width: 100%;
      min-height: 48px;
      padding: 4px 8px;
      font-weight: var(--ha-font-weight-medium, 500);
    }
    .badge {
      flex: none;
      display: grid;
      place-items: center;
      width: 36px;
      height: 36px;
      border-radius: 50%;
      color: var(--tone);
      background: color-mix(in srgb, var(--tone) 20%, transparent);
    }
    .margin {
      display: block;
      font-weight: var(--ha-font-weight-normal, 400);
    }
    .policy li {
      padding: 0 8px 8px 56px;
      line-height: 20px;
    }

    .people {
      margin-top: 8px;
      display: flex;
      flex-direction: column;
      gap: 4px;
    }
    .person {
      display: flex;
      align-items: center;
      flex-wrap: wrap;
      gap: 2px 8px;
      width: 100%;
      min-height: 44px;
      padding: 2px 4px;
    }
    .avatar {
      flex: none;
      display: grid;
      place-items: center;
      width: 36px;
      height: 36px;
      margin-inline-end: 4px;
      border-radius: 50%;
      background: color-mix(in srgb, var(--tint) 22%, transparent);
      font-weight: var(--ha-font-weight-medium, 500);
    }
    .avatar.busy {
      box-shadow: 0 0 0 2px var(--tint);
    }
    .name {
      flex: 1 1 4em;
      min-width: 0;
      overflow: hidden;
      text-overflow: ellipsis;
      white-space: nowrap;
    }
    .chip {
      flex: none;
      padding: 2px 10px;
      border-radius: 12px;
      font-size: var(--ha-font-size-s, 12px);
      line-height: 20px;
      background: color-mix(in srgb, var(--primary-text-color) 8%, transparent);
    }
    .chip.on {
      background: color-mix(in srgb, var(--tint) 26%, transparent);
    }

    .lanes {
      margin-top: 8px;
      display: flex;
      flex-direction: column;
      gap: 8px;
    }
    .lane {
      display: block;
      width: 100%;
      padding: 4px;
    }
    .numbers {
      display: flex;
      gap: 10px;
      align-items: baseline;
    }
    .numbers strong {
      font-size: var(--ha-font-size-s, 12px);
      font-weight: var(--ha-font-weight-medium, 500);
    }
    .gauge {
      display: block;
      position: relative;
      height: 8px;
      margin-top: 4px;
      border-radius: 4px;
      background: color-mix(in srgb, var(--primary-text-color) 8%, transparent);
    }
    .fill {
      display: block;
      height: 100%;
      max-width: 100%;
      border-radius: 4px;
      background: var(--tint);
    }
    .tick {
      position: absolute;
      top: -3px;
      bottom: -3px;
      width: 2px;
      margin-inline-start: -1px;
      border-radius: 1px;
      background: var(--primary-text-color);
    }
    svg {
      display: block;
      width: 100%;
      height: 34px;
      margin-top: 6px;
    }
    .floor {
      stroke: var(--divider-color);
      vector-effect: non-scaling-stroke;
    }
    .bar {
      fill: var(--tint);
      opacity: 0.8;
    }
    .fair {
      fill: none;
      stroke: var(--primary-text-color);
      stroke-width: 1.5;
      stroke-dasharray: 4 3;
      vector-effect: non-scaling-stroke;
    }
    .axis {
      display: flex;
      justify-content: space-between;
      padding: 0 4px;
    }
    .lanes ~ .note {
      padding: 0 4px;
    }
    .legend {
      display: flex;
      flex-wrap: wrap;
      align-items: center;
      gap: 2px 6px;
      padding: 0 4px;
    }
    .swatch,
    .dash {
      flex: none;
      width: 14px;
    }
    .swatch {
      height: 10px;
      border-radius: 2px;
      background: var(--secondary-text-color);
    }
    .dash {
      margin-inline-start: 8px;
      border-top: 2px dashed var(--primary-text-color);
    }

    table {
      width: 100%;
      margin-top: 4px;
      border-collapse: collapse;
      font-variant-numeric: tabular-nums;
    }
    th,
    td {
      padding: 0 4px;
      text-align: end;
      font-weight: inherit;
      white-space: nowrap;
    }
    th:first-child {
      text-align: start;
    }
    thead th {
      color: var(--secondary-text-color);
      font-size: var(--ha-font-size-s, 12px);
    }
    tbody tr {
      border-top: 1px solid var(--divider-color);
    }
    .kind {
      display: flex;
      align-items: center;
      gap: 10px;
      min-height: 44px;
      padding-inline-end: 8px;
      white-space: normal;
    }
    .kind + .chip {
      display: inline-block;
      margin: -6px 0 10px;
      margin-inline-start: 30px;
    }
    .kind ha-icon {
      color: var(--secondary-text-color);
      --mdc-icon-size: 20px;
    }

    .jobs li {
      padding: 6px 0;
    }
    .progress {
      display: block;
      height: 6px;
      margin-top: 4px;
      overflow: hidden;
      border-radius: 3px;
      background: color-mix(in srgb, var(--primary-text-color) 10%, transparent);
    }
    .progress > span {
      display: block;
      height: 100%;
      background: var(--primary-color);
    }
    .progress.finished > span {
      background: var(--success-color, #43a047);
    }
    .progress.failed > span,
    .progress.expired > span {
      background: var(--error-color, #db4437);
    }
    .progress.cancelled > span {
      background: var(--secondary-text-color);
    }
  `;
}

function tint(color) {
  // Mixed with the text's colour, it stands out from light and from dark alike.
  return `--tint: color-mix(in srgb, var(--${color}-color, var(--primary-color)) 78%, var(--primary-text-color))`;
}

function avatarOf(name, account) {
  if (account === "guest") return html`<ha-icon icon="mdi:account-group"></ha-icon>`;
  if (account === "house") return html`<ha-icon icon="mdi:home"></ha-icon>`;
  return [...name][0]?.toLocaleUpperCase() ?? "?";
}

function bar(value, index, num) {
  if (!value) return nothing;
  const width = LANE.width / num;
  const height = (LANE.height * Math.min(value, 100)) / 100;
  return svg`<rect class="bar" x=${index * width} y=${LANE.height - height} width=${width} height=${height}></rect>`;
}

/** Return a stepped line over what is known; where nobody wanted anything there is none. */
function steps(values) {
  const width = LANE.width / values.length;
  let isOpen = false;
  return values
    .map((value, index) => {
      const isKnown = Boolean(value);
      const y = LANE.height * (1 - (value ?? 0) / 100);
      const part = isKnown ? `${isOpen ? "L" : "M"}${index * width} ${y}H${(index + 1) * width}` : "";
      isOpen = isKnown;
      return part;
    })
    .join("");
}
