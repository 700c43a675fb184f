/**
 * Fairhearth in Home Assistant's frontend: one card and one dashboard strategy, registered so that the card picker and
 * the new-dashboard dialog offer them. Loaded by the integration; needs no resource to be added by hand.
 */

import { FairhearthCard } from "./card.js";
import { PLATFORM } from "./household.js";
import { FairhearthDashboardStrategy, FairhearthViewStrategy, strategyEntry } from "./strategy.js";
import { pageLanguage, text } from "./texts.js";

const ELEMENTS = {
  "fairhearth-card": FairhearthCard,
  "ll-strategy-dashboard-fairhearth": FairhearthDashboardStrategy,
  "ll-strategy-view-fairhearth": FairhearthViewStrategy,
};

for (const [name, element] of Object.entries(ELEMENTS)) {
  // A page that stayed open over an update may load a second version; the first one stays.
  if (!customElements.get(name)) customElements.define(name, element);
}

window.customCards ??= [];
window.customCards.push({
  type: "fairhearth-card",
  preview: true,
  documentationURL: "https://github.com/fairhearth/fairhearth/blob/main/docs/home-assistant.md",
  get name() {
    return text(pageLanguage(), "card_name");
  },
  get description() {
    return text(pageLanguage(), "card_description");
  },
  // Offered beside the built-in cards when somebody picks one of our entities first.
  getEntitySuggestion(hass, entityId) {
    return hass.entities[entityId]?.platform === PLATFORM ? { config: { type: "custom:fairhearth-card" } } : null;
  },
});

window.customStrategies ??= [];
window.customStrategies.push(strategyEntry("dashboard"));
