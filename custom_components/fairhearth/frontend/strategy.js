/**
 * The dashboard without YAML: what it holds follows from the entities that are there.
 */

import { DEFAULT_HOURS } from "./card.js";
import { CLASSES, householdOf } from "./household.js";
import { pageLanguage, text } from "./texts.js";

const RESIDENT_TILES = [
  "sensor.tokens_served",
  "sensor.tokens_left_today",
  "sensor.queue_time_p95",
  "sensor.time_to_first_token_p95",
  "sensor.inter_token_latency_p95",
  "sensor.preemptions",
];
const ENGINE_TILES = [
  "sensor.tokens_per_second",
  "sensor.kv_memory_used",
  "sensor.fairness_index",
  "sensor.tokens_served",
  "sensor.longest_iteration",
];
const CONTROL_DOMAINS = ["switch", "select", "number", "button"];

/** Makes a dashboard of two views: the picture of now, and every resident's details. */
export class FairhearthDashboardStrategy extends HTMLElement {
  static async generate(config, hass) {
    const say = (key) => text(hass.locale?.language ?? hass.language, key);
    return {
      title: say("dashboard_name"),
      views: [
        {
          title: say("dashboard_name"),
          path: "home",
          icon: "mdi:scale-balance",
          strategy: { ...config, type: "custom:fairhearth" },
        },
        {
          title: say("details"),
          path: "details",
          icon: "mdi:account-details",
          ...detailsView(config, hass),
        },
      ],
    };
  }
}

/** Makes the view of now; it can be one of several in somebody's own dashboard. */
export class FairhearthViewStrategy extends HTMLElement {
  static async generate(config, hass) {
    const { type: _type, ...options } = config;
    const card = (...parts) => ({ type: "custom:fairhearth-card", ...options, parts });
    const household = householdOf(hass, config.device);
    const now = [card("policy", "now")];
    const shares = [card("shares")];
    const waiting = [card("waiting")];
    if (household?.entities["sensor.jobs"]) now.push(card("jobs"));
    if (household) {
      now.push(...controlCards(household, hass));
      shares.push(...engineCards(household, hass));
      waiting.push(...classGraph(household, config, hass, "time_to_first_token_p95", "first_words"));
      waiting.push(...classGraph(household, config, hass, "slo_attainment", "answers_in_time"));
    }
    const sections = [now, shares, waiting];
    return {
      type: "sections",
      max_columns: 3,
      sections: sections.map((cards) => ({ type: "grid", cards })),
    };
  }
}

/** Return one of the sensors that every class has, as a graph under a heading; nothing where none is there. */
function classGraph({ entities }, config, hass, sensor, heading) {
  const say = (key) => text(hass.locale?.language ?? hass.language, key);
  const shown = CLASSES.map((name) => ({
    entity: entities[`sensor.${sensor}_${name}`],
    name: say(`class_${name}`),
  })).filter(({ entity }) => entity);
  if (!shown.length) return [];
  const graph = { type: "history-graph", hours_to_show: config.hours ?? DEFAULT_HOURS, entities: shown };
  return titled(say(heading), [graph]);
}

function engineCards({ entities }, hass) {
  return titled(text(hass.locale?.language ?? hass.language, "engine"), tiles(entities, ENGINE_TILES));
}

function controlCards({ entities }, hass) {
  const cards = controlsOf(entities).map((id) => tile(id, 12));
  return titled(text(hass.locale?.language ?? hass.language, "controls"), cards);
}

/** Return what can be set or pressed, in a lasting order. */
function controlsOf(entities) {
  return Object.values(entities)
    .filter((id) => CONTROL_DOMAINS.includes(id.split(".")[0]))
    .sort();
}

function detailsView(config, hass) {
  const household = householdOf(hass, config.device);
  const sections = (household?.residents ?? []).map(({ name, entities }) => {
    const waits = ["sensor.queue_time_p95", "sensor.time_to_first_token_p95"].map((key) => entities[key]).filter(Boolean);
    const graph = { type: "history-graph", hours_to_show: config.hours ?? DEFAULT_HOURS, entities: waits };
    return {
      type: "grid",
      cards: [...titled(name, [...tiles(entities, RESIDENT_TILES), ...controlsOf(entities).map((id) => tile(id, 6))]), graph],
    };
  });
  return { type: "sections", max_columns: 3, sections };
}

function titled(heading, cards) {
  return cards.length ? [{ type: "heading", heading }, ...cards] : [];
}

function tiles(entities, keys) {
  return keys.filter((key) => entities[key]).map((key) => tile(entities[key], 6));
}

function tile(entity, columns) {
  const isButton = entity.startsWith("button."); // whose state is only when it was pressed last
  return { type: "tile", entity, name: { type: "entity" }, hide_state: isButton, grid_options: { columns, rows: 1 } };
}

/** Return how the new-dashboard dialog shows the strategy; its texts are read when it is opened. */
export function strategyEntry(strategyType) {
  return {
    type: "fairhearth",
    strategyType,
    get name() {
      return text(pageLanguage(), "dashboard_name");
    },
    get description() {
      return text(pageLanguage(), "dashboard_description");
    },
  };
}
