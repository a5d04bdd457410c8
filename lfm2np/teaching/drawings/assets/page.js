"use strict";
// Everything that is shown was written by Python; this only shows, hides and marks, and puts numbers of the page side
// by side. Without it all views stand one below the other, at their last step.
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// All of a page: what listens beyond its body does so until `left` is aborted, where another page takes its place.
function begin(left) {
  const listen = (target, kind, does) => target.addEventListener(kind, does, { signal: left });
  const PACE = 900;  // milliseconds a step
  const still = matchMedia("(prefers-reduced-motion: reduce)");  // then time jumps from step to step
  const views = all(".view");
  const players = {};
  for (const bar of all(".player")) {
    const name = bar.dataset.player;
    const slider = bar.querySelector("input");
    const steps = [];
    for (const view of views.filter((one) => one.dataset.player === name))
      for (const part of all("[data-step]", view)) (steps[part.dataset.step] ||= []).push(part);
    const me = (players[name] = { name, bar, slider, steps, last: +slider.max, step: +slider.max, timer: 0, part: 0 });
    const pictures = views.filter((one) => one.dataset.player === name).flatMap((one) => all(".plays", one));
    const turn = (part, on) => (part.classList.contains("at") ? (part.hidden = !on) : part.classList.toggle("now", on));
    me.show = (wanted) => {
      const step = Math.max(0, Math.min(me.last, wanted));
      for (const part of me.steps[me.step] || []) turn(part, false);
      for (const part of me.steps[step] || []) turn(part, true);
      me.step = step;
      slider.value = step;
      bar.querySelector("output").textContent = `step ${step} of ${me.last}`;
      me.glide(0, false);
    };
    // Where time stands in pictures of it: at the end of a step, and `part` of the way through the next one.
    me.glide = (part, follows) => {
      me.part = part;
      for (const picture of pictures) {
        const { left, wide, steps, full } = picture.dataset, x = +left + wide * (me.step + 1 + part);
        picture.querySelector("clipPath rect").setAttribute("width", me.step === me.last ? full : x);
        picture.querySelector(".playhead").setAttribute("transform", `translate(${x - left - wide * steps})`);
        const box = picture.closest(".scroll"), at = (x * picture.ownerSVGElement.clientWidth) / full - box.scrollLeft;
        if (follows && (at < 60 || at > box.clientWidth - 60)) box.scrollLeft += at - box.clientWidth / 2;
      }
    };
    const pressed = (on) => {
      const button = bar.querySelector(".play");
      button.textContent = on ? "Pause" : "Play";
      button.setAttribute("aria-label", `${button.textContent} ${bar.dataset.what}`);
    };
    me.speak = () => {  // of steps that play by themselves, nothing
      const said = all(".says", current).find((one) => one.checkVisibility());
      bar.querySelector(".spoken").textContent = said ? said.textContent : `step ${me.step} of ${me.last}`;
    };
    me.pause = () => { cancelAnimationFrame(me.timer); me.timer = 0; pressed(false); };
    me.play = () => {
      if (me.timer) { me.pause(); return me.speak(); }
      if (me.step === me.last) me.show(0);
      pressed(true);
      let before = performance.now(), part = me.part;
      const tick = (now) => {
        part += (Math.max(0, now - before) / PACE) * bar.querySelector(".speed").value;
        before = now;
        if (part >= 1) { part = 0; me.show(me.step + 1); remember(); }
        if (me.step === me.last) return me.pause();
        me.glide(still.matches ? 0 : part, true);
        me.timer = requestAnimationFrame(tick);
      };
      me.timer = requestAnimationFrame(tick);
    };
    me.go = (step) => { me.pause(); me.show(step); me.glide(0, true); remember(); me.speak(); };
    slider.addEventListener("input", () => me.go(+slider.value));
    bar.querySelector(".first").addEventListener("click", () => me.go(0));
    bar.querySelector(".back").addEventListener("click", () => me.go(me.step - 1));
    bar.querySelector(".on").addEventListener("click", () => me.go(me.step + 1));
    bar.querySelector(".play").addEventListener("click", me.play);
    bar.querySelector(".speed").addEventListener("change", (event) => {
      for (const one of all(".speed")) one.value = event.target.value;
    });
  }

  // One view a screen.
  let current = views[0];
  function place(view) {
    current = view;
    for (const one of views) one.classList.toggle("current", one === view);
    for (const link of all(".side nav a")) {
      if (link.hash !== `#${view.id}`) { link.removeAttribute("aria-current"); continue; }
      link.setAttribute("aria-current", "page");
      const bar = link.closest("ol");
      bar.scrollLeft = link.offsetLeft - bar.offsetLeft - (bar.clientWidth - link.offsetWidth) / 2;
    }
    for (const one of Object.values(players)) {
      const mine = one.name === view.dataset.player;
      if (!mine) one.pause();
      one.bar.hidden = !mine;
    }
  }
  function remember() {
    const me = players[current.dataset.player];
    history.replaceState(null, "", `#${current.id}${me ? `:${me.step}` : ""}`);
  }
  function fromHash() {
    const [id, step] = location.hash.slice(1).split(":");
    const view = views.find((one) => one.id === id);
    if (!view) return;
    place(view);
    const me = players[view.dataset.player];
    if (me && step !== undefined && /^\d+$/.test(step)) me.show(+step);
    remember();
    scrollTo(0, 0);
  }

  listen(document, "keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "Escape") event.target.closest("details[open]")?.removeAttribute("open");
    const scrolls = event.target.closest(".scroll");
    if (scrolls && scrolls.scrollWidth > scrolls.clientWidth) return;
    const me = players[current.dataset.player];
    if (me && "pP".includes(event.key)) me.play();
    const to = me && { ArrowRight: me.step + 1, ArrowLeft: me.step - 1, Home: 0, End: me.last }[event.key];
    if (to !== undefined) { me.go(to); event.preventDefault(); }
  });

  // Sound or broken.
  function chooseLeak(index) { for (const part of all("[data-choice]")) part.hidden = part.dataset.choice !== index; }
  for (const radio of all("input[name=leak]")) {
    radio.addEventListener("change", () => chooseLeak(radio.value));
    if (radio.checked) chooseLeak(radio.value);
  }

  let wasOpen = [];
  listen(window, "beforeprint", () => {
    wasOpen = all("details:not([open])");
    for (const one of wasOpen) one.open = true;
  });
  listen(window, "afterprint", () => { for (const one of wasOpen) one.open = false; });
  listen(window, "hashchange", fromHash);
  document.documentElement.classList.add("script");
  for (const one of Object.values(players)) one.show(+one.bar.dataset.start);
  if (current) place(views.find((one) => one.id === document.body.dataset.start) || current);
  fromHash();
  history.scrollRestoration = "manual";
  listen(window, "load", () => scrollTo(0, 0));  // a view is not at its place in the page
  left.addEventListener("abort", () => { for (const one of Object.values(players)) one.pause(); });
}
