"use strict";
// The part that the pages have in common: the link to the program, keys, and what is shown.
// A page defines `LOST_WORDS`, `show(status)`, `keysChanged()` and `caption(figure, name)`, and then
// calls `listen`.
// ``page.py`` puts this text into the page, so that the page is one file.
const $ = (id) => document.getElementById(id);
const LOST = 1200; // ms without a word, of a program that says one every 250 ms
const OLD = 2000; // ms after which what is shown is called old
const GIVE_UP = 8000; // ms for a connection to open; the browser itself may wait 5 s
const AGAIN = 1000; // ms between a closed connection and the next
const MOTION_KEYS = "wsadrfqe";
const held = new Set(); // motion keys that are held
let socket = null;
let heard = -Infinity; // when the program last said something
let begun = 0; // when the connection began to open, and then when it was open
let link = "lost"; // "lost", "old" (nothing new is shown), "refused" or "" for a good one
let stopPending = false; // a stop that the program could not hear
let waiting = []; // names of the cameras whose images are still to come

function connect() {
  const mine = new WebSocket(`ws://${location.host}/socket`);
  socket = mine;
  begun = performance.now();
  mine.binaryType = "blob";
  mine.onopen = () => {
    begun = performance.now();
    mine.send(location.hash.slice(1));
  };
  mine.onmessage = (event) => {
    if (mine !== socket) return;
    heard = performance.now();
    if (typeof event.data !== "string") return picture(event.data);
    const message = JSON.parse(event.data);
    if (message.status) {
      waiting = [...message.status.cameras];
      show(message.status);
    }
    setLink(message.age * 1000 > OLD ? "old" : "", message.age);
    if (stopPending) {
      stopPending = false;
      tell({ do: "estop" });
    }
  };
  mine.onclose = (event) => {
    if (mine !== socket) return;
    socket = null;
    setLink(event.code === 4001 ? "refused" : "lost");
    if (event.code !== 4001) setTimeout(() => socket || connect(), AGAIN);
  };
}

// A stopped program or a broken network closes nothing: silence tells.
function watch() {
  const now = performance.now();
  if (link === "refused" || now - heard < LOST) return;
  setLink("lost");
  if (!socket || (socket.readyState === 0 && now - begun < GIVE_UP)) return;
  if (socket.readyState === 1 && now - begun < LOST) return; // it has just opened
  const old = socket;
  socket = null;
  old.close();
  connect();
}

const WORDS = {
  lost: () => LOST_WORDS + (stopPending ? " STOP is sent as soon as it does." : ""),
  refused: () =>
    "The address has the wrong token: open the address that the program printed last.",
  old: (age) => `The program has shown nothing new for ${Math.round(age)} s.`,
};
function setLink(now, age) {
  const changed = link !== now;
  link = now;
  document.body.dataset.link = now;
  if (now) {
    $("mode").textContent = now === "old" ? "no news" : "no link";
    $("mode").dataset.mode = "lost";
    $("reason").textContent = WORDS[now](age);
    for (const button of document.querySelectorAll("button[data-do]"))
      button.disabled = button.dataset.do !== "estop";
  }
  if (changed && now) releaseKeys();
}

// Nothing that a person asks for may come late, except a stop.
function tell(message) {
  const stops = message.do === "estop";
  const able = socket && socket.readyState === 1 && link !== "lost" && link !== "refused";
  if (able && (link === "" || stops || !message.do)) socket.send(JSON.stringify(message));
  if (stops && link === "lost") {
    stopPending = true;
    setLink("lost");
  }
}
function tellKeys() {
  for (const key of document.querySelectorAll("[data-key]"))
    key.classList.toggle("held", held.has(key.dataset.key));
  keysChanged();
}
// A key whose release is not heard must not keep the arm moving.
function releaseKeys() {
  held.clear();
  tellKeys();
}

// What the program shows.
function tableRow(texts) {
  const row = document.createElement("tr");
  for (const text of texts)
    row.append(Object.assign(document.createElement("td"), { textContent: text }));
  return row;
}
function picture(blob) {
  const name = waiting.shift();
  let figure = document.querySelector(`figure[data-camera="${CSS.escape(name)}"]`);
  if (!figure) {
    figure = document.createElement("figure");
    figure.dataset.camera = name;
    figure.append(document.createElement("img"), document.createElement("figcaption"));
    $("cameras").append(figure);
  }
  caption(figure, name);
  const image = figure.firstChild;
  const old = image.src;
  image.src = URL.createObjectURL(blob);
  if (old) URL.revokeObjectURL(old);
}

// What the person does: `ask(what)` for buttons and their keys, `space()` for the gripper.
function listen(shortcuts, ask, space) {
  for (const button of document.querySelectorAll("button[data-do]"))
    button.onclick = () => {
      ask(button.dataset.do);
      button.blur();
    };
  for (const button of document.querySelectorAll("button[data-key]")) {
    const release = () => held.delete(button.dataset.key) && tellKeys();
    button.onpointerdown = (event) => {
      button.setPointerCapture(event.pointerId);
      held.add(button.dataset.key);
      tellKeys();
    };
    button.onpointerup = button.onpointercancel = button.onlostpointercapture = release;
    button.onfocus = () => button.blur();
    button.oncontextmenu = () => false; // a long touch is no wish for a menu
    button.tabIndex = -1;
  }
  $("gripper").onclick = () => {
    space();
    $("gripper").blur();
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in shortcuts) {
      if (!event.repeat) ask(shortcuts[event.key]);
    } else if (event.key === " ") {
      if (!event.repeat) space();
    } else if (MOTION_KEYS.includes(event.key)) {
      held.add(event.key);
      if (!event.repeat) tellKeys();
    } else {
      return;
    }
    event.preventDefault();
  });
  addEventListener("keyup", (event) => {
    if (held.delete(event.key)) tellKeys();
  });
  addEventListener("blur", releaseKeys);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) releaseKeys();
  });
  // Keys are told ten times a second: without them the arm stops following the person.
  setInterval(tellKeys, 100);
  setInterval(watch, 100);
  connect();
}
