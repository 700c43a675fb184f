/**
 * Reads how shares went over some hours from Home Assistant's recorder, and averages them. Draws nothing.
 *
 * Older times come from the recorder's five-minute statistics, the latest from its history, so that a day of a busy
 * household is a few hundred numbers and a household that was set up a minute ago has a picture too.
 */

const HOUR_MS = 3_600_000;
const HISTORY_ONLY_HOURS = 2;
export const NUM_BINS = 72;

/**
 * Return the mean value of each entity in equal parts of the last hours.
 *
 * `bins` maps an entity id to NUM_BINS means, undefined where nothing is known. Times are milliseconds. Rejects as
 * `hass.callWS` does, for example with the code "unknown_command" where the recorder is switched off.
 */
export async function readHistory(hass, entityIds, hours, now = Date.now()) {
  const start = now - hours * HOUR_MS;
  const older = hours > HISTORY_ONLY_HOURS ? await readStatistics(hass, entityIds, start, now) : {};
  const ends = Object.values(older).flatMap((segments) => segments.map((segment) => segment.end));
  const resume = ends.length ? Math.max(...ends) : start;
  const latest = await readStates(hass, entityIds, resume, now);
  const bins = {};
  for (const id of entityIds) {
    bins[id] = binned([...(older[id] ?? []), ...(latest[id] ?? [])], start, now, NUM_BINS);
  }
  return { start, end: now, bins };
}

async function readStatistics(hass, entityIds, start, end) {
  const found = await hass.callWS({
    type: "recorder/statistics_during_period",
    start_time: new Date(start).toISOString(),
    end_time: new Date(end).toISOString(),
    statistic_ids: entityIds,
    period: "5minute",
    types: ["mean"],
  });
  return mapped(found, (rows) =>
    rows
      .filter((row) => row.mean !== null && row.mean !== undefined)
      .map((row) => ({ start: row.start, end: row.end, value: row.mean })),
  );
}

async function readStates(hass, entityIds, start, end) {
  const found = await hass.callWS({
    type: "history/history_during_period",
    start_time: new Date(start).toISOString(),
    end_time: new Date(end).toISOString(),
    entity_ids: entityIds,
    minimal_response: true,
    no_attributes: true,
    significant_changes_only: false,
  });
  return mapped(found, (rows) => segmentsOf(rows, start, end));
}

/** Turn the recorder's changes into stretches of time with one value; what is not a number leaves a gap. */
export function segmentsOf(rows, start, end) {
  return rows
    .map((row, index) => ({
      start: Math.max(row.lu * 1000, start),
      end: index + 1 < rows.length ? rows[index + 1].lu * 1000 : end,
      value: row.s === "" ? NaN : Number(row.s),
    }))
    .filter((segment) => Number.isFinite(segment.value) && segment.end > segment.start);
}

/** Return the mean in each of num equal parts of [start, end), weighted by time; undefined where nothing is known. */
export function binned(segments, start, end, num) {
  const width = (end - start) / num;
  const sums = new Array(num).fill(0);
  const known = new Array(num).fill(0);
  for (const segment of segments) {
    const first = Math.max(0, Math.floor((segment.start - start) / width));
    const last = Math.min(num - 1, Math.floor((segment.end - start) / width));
    for (let index = first; index <= last; index += 1) {
      const from = Math.max(segment.start, start + index * width);
      const to = Math.min(segment.end, start + (index + 1) * width);
      if (to <= from) continue;
      sums[index] += segment.value * (to - from);
      known[index] += to - from;
    }
  }
  return sums.map((sum, index) => (known[index] > 0 ? sum / known[index] : undefined));
}

/**
 * Return what each had of all together, in percent: `bins` in each part, undefined where nobody had anything, and `whole`
 * over all parts. Hours in which everybody slept say nothing about fairness and count for nothing.
 *
 * all: the bins of everybody's share, in the order of the answer.
 */
export function sharesOf(all) {
  const sums = (all[0] ?? []).map((_, index) => sum(all.map((one) => one[index] ?? 0)));
  const total = sum(sums);
  return all.map((one) => ({
    bins: one.map((value, index) => (sums[index] > 0 ? (100 * (value ?? 0)) / sums[index] : undefined)),
    whole: total > 0 ? (100 * sum(one.map((value) => value ?? 0))) / total : undefined,
  }));
}

function sum(values) {
  return values.reduce((before, value) => before + value, 0);
}

function mapped(object, change) {
  return Object.fromEntries(Object.entries(object ?? {}).map(([key, value]) => [key, change(value)]));
}
