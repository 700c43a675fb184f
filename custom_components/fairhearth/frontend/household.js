/**
 * Finds one engine's household in what Home Assistant's frontend knows. Pure: reads, asks nobody, draws nothing.
 *
 * Entities are found by device and translation key, so that they may be renamed as anyone likes.
 */

export const PLATFORM = "fairhearth";

export const CLASSES = ["voice", "accessibility", "chat", "agent", "embedding", "background"];

const COLORS = ["indigo", "teal", "amber", "pink", "light-blue", "deep-orange", "lime", "purple"];
const GUEST_COLOR = "brown";
const HOUSE_COLOR = "blue-grey";

/**
 * Return the household around an engine: the one with the given device id, else the first; undefined where none is.
 *
 * The result has `id` and `name` of the engine, its `entities`, and `residents` with `id`, `name`, `color`, `entities`.
 * `entities` maps "domain.translation_key" to an entity id.
 */
export function householdOf(hass, deviceId) {
  const byDevice = entitiesByDevice(hass);
  const engines = Object.values(hass.devices)
    .filter((device) => byDevice.get(device.id)?.["binary_sensor.policy_met"])
    .sort((one, other) => nameOf(one).localeCompare(nameOf(other)) || compare(one.id, other.id));
  const engine = deviceId ? engines.find((device) => device.id === deviceId) : engines[0];
  if (!engine) return undefined;
  return {
    id: engine.id,
    name: nameOf(engine),
    entities: byDevice.get(engine.id),
    residents: residentsOf(hass, engine, byDevice),
  };
}

/** Return every entity id of a household. */
export function entityIdsOf(household) {
  return [household, ...household.residents].flatMap((owner) => Object.values(owner.entities));
}

/** Return the state of an entity as a number; undefined where it has none. */
export function numberOf(hass, entityId) {
  const state = hass.states[entityId]?.state;
  const number = state === undefined || state === "" ? NaN : Number(state);
  return Number.isFinite(number) ? number : undefined;
}

/** Return whether an entity says anything at present. */
export function isAvailable(hass, entityId) {
  const state = hass.states[entityId]?.state;
  return state !== undefined && state !== "unavailable" && state !== "unknown";
}

function entitiesByDevice(hass) {
  const found = new Map();
  for (const entity of Object.values(hass.entities)) {
    if (entity.platform !== PLATFORM || !entity.device_id || !entity.translation_key) continue;
    if (entity.hidden || !(entity.entity_id in hass.states)) continue; // a disabled one has no state
    if (!found.has(entity.device_id)) found.set(entity.device_id, {});
    found.get(entity.device_id)[`${entity.entity_id.split(".")[0]}.${entity.translation_key}`] = entity.entity_id;
  }
  return found;
}

function residentsOf(hass, engine, byDevice) {
  const residents = Object.values(hass.devices)
    .filter((device) => device.via_device_id === engine.id && byDevice.get(device.id)?.["sensor.service_share"])
    .map((device) => ({
      id: device.id,
      name: nameOf(device),
      account: accountOf(device),
      entities: byDevice.get(device.id),
    }))
    .sort((one, other) => rank(one) - rank(other) || one.name.localeCompare(other.name) || compare(one.id, other.id));
  return residents.map((resident, index) => ({ ...resident, color: colorOf(resident, index) }));
}

/** Return "guest" or "house" for the engine's own residents, undefined for a person. */
function accountOf(device) {
  const identifiers = (device.identifiers ?? []).map((identifier) => String(identifier[1]));
  return ["guest", "house"].find((account) => identifiers.some((identifier) => identifier.endsWith(`_${account}`)));
}

/** People first, then the guests, then the house. */
function rank(resident) {
  return [undefined, "guest", "house"].indexOf(resident.account);
}

function colorOf(resident, index) {
  if (resident.account === "guest") return GUEST_COLOR;
  return resident.account === "house" ? HOUSE_COLOR : COLORS[index % COLORS.length];
}

function nameOf(device) {
  return device.name_by_user || device.name || device.id;
}

function compare(one, other) {
  return one < other ? -1 : Number(one > other);
}
