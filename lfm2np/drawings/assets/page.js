"use strict";
// Steps recorded runs: everything that is shown was written by Python; this only shows, hides and marks.
const players = {};
for (const bar of document.querySelectorAll(".player")) {
  const name = bar.dataset.player;
  const views = [...document.querySelectorAll(`.view[data-player="${name}"]`)];
  const slider = bar.querySelector("input");
  const steps = [];
  for (const view of views)
    for (const part of view.querySelectorAll("[data-step]"))
      (steps[part.dataset.step] ||= []).push(part);
  const me = players[name] = { name, bar, views, slider, steps, last: +slider.max, step: +slider.max, timer: 0 };
  me.show = (wanted) => {
    const step = Math.max(0, Math.min(me.last, wanted));
    for (const part of me.steps[me.step] || []) part.classList.contains("at") ? (part.hidden = true) : part.classList.remove("now");
    for (const part of me.steps[step] || []) part.classList.contains("at") ? (part.hidden = false) : part.classList.add("now");
    me.step = step;
    slider.value = step;
    bar.querySelector("output").textContent = `step ${step} of ${me.last}`;
  };
  me.pause = () => { clearInterval(me.timer); me.timer = 0; bar.querySelector(".play").setAttribute("aria-pressed", "false"); };
  me.play = () => {
    if (me.timer) return me.pause();
    if (me.step === me.last) me.show(0);
    bar.querySelector(".play").setAttribute("aria-pressed", "true");
    me.timer = setInterval(() => { me.show(me.step + 1); remember(me); if (me.step === me.last) me.pause(); }, 700);
  };
  const go = (step) => { me.pause(); me.show(step); remember(me); };
  slider.addEventListener("input", () => go(+slider.value));
  bar.querySelector(".first").addEventListener("click", () => go(0));
  bar.querySelector(".back").addEventListener("click", () => go(me.step - 1));
  bar.querySelector(".on").addEventListener("click", () => go(me.step + 1));
  bar.querySelector(".play").addEventListener("click", me.play);
  me.go = go;
}

let current = document.querySelector(".view");
function place(view) {  // the player of the view that is looked at stands above it
  if (!view) return;
  current = view;
  for (const one of Object.values(players)) {
    const mine = one.name === view.dataset.player;
    if (!mine) one.pause();
    one.bar.hidden = !mine;
  }
}
function remember(me) { history.replaceState(null, "", `#${current.id}:${me.step}`); }

const seen = new IntersectionObserver((entries) => {
  for (const one of entries) one.target.dataset.seen = one.isIntersecting ? one.intersectionRect.height : 0;
  const best = [...document.querySelectorAll(".view")].reduce((a, b) => (+b.dataset.seen > +(a.dataset.seen || 0) ? b : a));
  place(best);
}, { threshold: [0, .1, .25, .5, .75, 1] });
for (const view of document.querySelectorAll(".view")) seen.observe(view);

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  const me = players[current.dataset.player];
  if (event.key === "Escape") event.target.closest("details[open]")?.removeAttribute("open");
  if (!me) return;
  if (event.key === "ArrowRight" && !event.target.closest(".scroll")) { me.go(me.step + 1); event.preventDefault(); }
  else if (event.key === "ArrowLeft" && !event.target.closest(".scroll")) { me.go(me.step - 1); event.preventDefault(); }
  else if (event.key === "Home" && !event.target.closest(".scroll")) { me.go(0); event.preventDefault(); }
  else if (event.key === "End" && !event.target.closest(".scroll")) { me.go(me.last); event.preventDefault(); }
});

function fromHash() {
  const [id, step] = location.hash.slice(1).split(":");
  const view = id && document.getElementById(id);
  if (!view || !view.classList.contains("view")) return;
  place(view);
  const me = players[view.dataset.player];
  if (me && step !== undefined && /^\d+$/.test(step)) me.show(+step);
  view.scrollIntoView();
}
addEventListener("hashchange", fromHash);
for (const one of Object.values(players)) one.show(+one.bar.dataset.start);
fromHash();
place(current);

for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
for (const radio of document.querySelectorAll("input[name=leak]"))
  radio.addEventListener("change", () => chooseLeak(radio.value));
function chooseLeak(index) {
  for (const part of document.querySelectorAll("[data-choice]")) part.hidden = part.dataset.choice !== index;
}
if (document.querySelector("input[name=leak]")) chooseLeak(document.querySelector("input[name=leak]:checked").value);

const quiz = document.querySelector("input.quiz");
if (quiz) {
  let right = 0, asked = 0;
  const score = () => { document.querySelector(".score").textContent = quiz.checked && asked ? `${right} of ${asked} right` : ""; };
  quiz.addEventListener("change", () => {
    right = asked = 0;
    for (const item of document.querySelectorAll(".ledger li")) {
      item.querySelector(".class").hidden = quiz.checked;
      item.querySelector(".guesses").hidden = !quiz.checked;
      item.querySelector(".guesses output").textContent = "";
      for (const button of item.querySelectorAll(".guess")) button.disabled = false;
    }
    score();
  });
  for (const button of document.querySelectorAll(".guess"))
    button.addEventListener("click", () => {
      const item = button.closest("li"), good = button.dataset.right === "yes";
      asked += 1;
      right += good;
      item.querySelector(".guesses output").textContent = good ? "right" : "no";
      item.querySelector(".class").hidden = false;
      for (const one of item.querySelectorAll(".guess")) one.disabled = true;
      score();
    });
}

let wasOpen = [];
addEventListener("beforeprint", () => { wasOpen = [...document.querySelectorAll("details:not([open])")]; for (const one of wasOpen) one.open = true; });
addEventListener("afterprint", () => { for (const one of wasOpen) one.open = false; });
