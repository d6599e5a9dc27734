"use strict";
// Each event is the section with the numbers, as the server draws it for a browser without scripts.
const state = document.getElementById("state");
const numbers = document.getElementById("numbers");
const events = new EventSource("?events");
events.onmessage = (event) => {
  numbers.innerHTML = event.data;
  if (state.textContent !== "live") state.textContent = "live";
};
events.onerror = () => {
  state.textContent = events.readyState === EventSource.CLOSED
    ? "not live: too many pages are open, or the application has ended" : "connecting again";
};
