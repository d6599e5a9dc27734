"use strict";
// The server draws the picture, also for a browser without scripts. This asks for a new one twice a second.
const picture = document.getElementById("picture");
const state = document.getElementById("state");
async function draw() {
  try {
    const response = await fetch("/page/picture");
    if (!response.ok) throw new Error(response.status);
    picture.innerHTML = await response.text();
    state.textContent = "";
  } catch {
    state.textContent = "The demo does not answer.";
  }
}
async function drawAgain() {
  if (!document.hidden) await draw();
  setTimeout(drawAgain, 500);
}
document.getElementById("send").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = new URLSearchParams({requests: event.submitter?.value ?? "1"});
  try {
    await fetch("/page/send", {method: "POST", body, redirect: "manual"});
  } finally {
    draw();
  }
});
drawAgain();
