"use strict";
// Everything that is shown was written by Python; this only shows, hides and marks, and puts numbers of the page side
// by side. Without it all views stand one below the other, at their last step.
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// All of a page: what listens beyond its body does so until `left` is aborted, where another page takes its place.
function begin(left) {
  const listen = (target, kind, does) => target.addEventListener(kind, does, { signal: left });
  const PACE = 900;  // milliseconds a step
  const still = matchMedia("(prefers-reduced-motion: reduce)");  // then time jumps from step to step
  const isDeck = document.body.classList.contains("slides");  // slides, not a page
  const views = all(".view");
  const players = {};
  const marked = [];  // numbers that are lit
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
      forget();
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
    forget();
    if (isDeck) fit(view);
  }
  // Slides: the picture as large as there is room for.
  function fit(view, most = 1.8) {
    const stage = view.querySelector(".drawn"), shown = stage?.firstElementChild;
    if (!shown) return;
    const fits = (zoom) => {
      shown.style.zoom = zoom;
      return stage.scrollHeight <= stage.clientHeight && stage.scrollWidth <= stage.clientWidth;
    };
    let low = 0.2, high = most;
    for (let round = 0; round < 8; round++) fits((low + high) / 2) ? (low = (low + high) / 2) : (high = (low + high) / 2);
    fits(low);
  }
  function turn(by) {
    const view = views[Math.max(0, Math.min(views.length - 1, views.indexOf(current) + by))];
    if (view === current) return;
    place(view);
    remember();
    const heading = view.querySelector("h1, h2");  // read aloud where a screen reader follows
    heading.tabIndex = -1;
    heading.focus();
  }
  function toggle(button, on) { button.setAttribute("aria-pressed", on); }
  const tools = {
    note: (button) => { toggle(button, document.body.classList.toggle("with-notes")); fit(current); },
    full: () => (document.fullscreenElement ? document.exitFullscreen() : document.documentElement.requestFullscreen()),
  };
  for (const [kind, does] of Object.entries(tools))
    for (const button of all(`.desk .${kind}`)) button.addEventListener("click", () => does(button));
  for (const [kind, by] of [["back", -1], ["on", 1]])
    for (const button of all(`.turns .${kind}`)) button.addEventListener("click", () => turn(by));
  if (isDeck) {
    listen(window, "resize", () => fit(current));
    listen(document, "fullscreenchange", () => toggle(document.querySelector(".desk .full"), !!document.fullscreenElement));
  }
  // The keys of slides; the others are the player's.
  function turned(event) {
    const { key, shiftKey, target } = event;
    if (key === " " && target.closest("button, summary, a")) return false;
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 1, PageUp: -1, " ": 1, Home: -views.length, End: views.length }[key];
    if (by !== undefined && !(shiftKey && key.startsWith("Arrow"))) turn(shiftKey ? -by : by);
    else if ("nN".includes(key)) document.querySelector(".desk .note").click();
    else if ("fF".includes(key)) document.querySelector(".desk .full").click();
    else return false;
    return true;
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
    if (event.key === "Escape") { event.target.closest("details[open]")?.removeAttribute("open"); forget(); }
    const scrolls = event.target.closest(".scroll");
    if (event.target.closest("[data-how] td") || (scrolls && scrolls.scrollWidth > scrolls.clientWidth)) return;
    if (isDeck && turned(event)) return event.preventDefault();
    const me = players[current.dataset.player];
    if (me && "pP".includes(event.key)) me.play();
    const to = me && { ArrowRight: me.step + 1, ArrowLeft: me.step - 1, Home: 0, End: me.last }[event.key];
    if (to !== undefined) { me.go(to); event.preventDefault(); }
  });

  // The picture of a block: parts of the network, and what a number was made of.
  for (const chooser of all(".parts")) {
    const choose = (wanted) => {
      for (const part of all("[data-part]", chooser.closest(".view"))) part.hidden = part.dataset.part !== wanted;
      for (const one of all("button", chooser)) one.setAttribute("aria-pressed", one.value === wanted);
      forget();
      if (isDeck && current.contains(chooser)) fit(current);
    };
    chooser.addEventListener("click", (event) => event.target.closest("button") && choose(event.target.closest("button").value));
    choose(chooser.dataset.first);
  }
  function forget() {
    for (const one of marked.splice(0)) one.classList.remove("lit", "with", "made");
    for (const one of all(".readout")) one.textContent = one.dataset.hint ||= one.textContent;
  }
  const whole = (cell) => cell.title || cell.textContent;
  const signed = (text) => (text.startsWith("-") ? `(${text})` : text);
  // For each way in which a matrix is made: the cells that entered one of its cells, and its sum in words.
  // `of` gives the cells of a row of the named matrix, `r` and `c` are the row and the column.
  const times = (a, b) => a.map((one, k) => `${signed(whole(one))} \u00d7 ${signed(whole(b[k]))}`).join(" + ");
  const HOW = {
    embed: ({ of, r, numbers }) => [of(0) ? of(0)[numbers("ids")[r]] : [], [], "from the table of embeddings, the token's own row"],
    before: () => [[], [], "what the block before made"],
    picked: () => [[], [], "the row of a token that the next one follows"],
    angle: () => [[], [], "of the row's position times the speed of its pair of channels"],
    kept: () => [[], [], "kept from the steps before"],
    cached: () => [[], [], "written by this step, at this position"],
    linear: ({ of, r, c }) => {
      const x = of(0)[r], w = of(1).map((row) => row[c]);
      return [x, w, times(x, w)];
    },
    multiply: ({ of, r, c, at, numbers }) => {
      const row = r + (numbers("row")[0] || 0), a = of(0)[row][c + at[0]], b = of(1)[row][c + at[1]];
      return [[a], [b], times([a], [b])];
    },
    add: ({ of, r, c }) => {
      const a = of(0)[r][c], b = of(1)[r][c];
      return [[a], [b], `${signed(whole(a))} + ${signed(whole(b))}`];
    },
    norm: ({ of, r, c, at, numbers, table }) => {
      const [size] = numbers("size"), k = c % size, row = of(0)[r].slice(at[0] + c - k, at[0] + c - k + size), w = of(1)[0][k];
      const squares = row.map((one) => `${signed(whole(one))}\u00b2`).join(" + ");
      return [row, [w], `${signed(whole(row[k]))} \u00f7 \u221a((${squares}) \u00f7 ${size} + ${table.dataset.eps}) \u00d7 ${signed(whole(w))}`];
    },
    convolve: ({ of, r, c, numbers }) => {
      const starts = numbers("starts"), mine = starts.findLastIndex((one) => one <= r), taps = of(starts.length).map((row) => row[c]);
      const u = taps.map((_, j) => of(mine)[r - starts[mine] + j][c]);
      return [u, taps, times(u, taps)];
    },
    swiglu: ({ of, r, c, at }) => {
      const gate = of(0)[r][c + at[0]], up = of(1)[r][c + at[1]];
      return [[gate], [up], `${signed(whole(gate))} \u00f7 (1 + exp(\u2212${signed(whole(gate))})) \u00d7 ${signed(whole(up))}`];
    },
    rotate: ({ of, r, c, numbers }) => {
      const [size] = numbers("size"), half = size / 2, k = c % size, pair = k % half, first = c - k;
      const a = of(0)[r][first + pair], b = of(0)[r][first + half + pair], cos = of(1)[r][pair], sin = of(2)[r][pair];
      const [x, y, sign] = k < half ? [a, b, "\u2212"] : [b, a, "+"];
      return [[x, y], [cos, sin], `${times([x], [cos])} ${sign} ${times([y], [sin])}`];
    },
    score: ({ of, r, c, numbers }) => {
      const [column, row, key] = numbers("at"), [size] = numbers("size");
      const q = of(0)[r + row].slice(column, column + size), k = of(1)[c].slice(key, key + size);
      return [q, k, `(${times(q, k)}) \u00f7 \u221a${size}`];
    },
    softmax: ({ of, r, c }) => {
      const row = of(0)[r].filter((one) => one.textContent), me = of(0)[r][c];
      return [row, [me], `exp(${whole(me)}) \u00f7 (${row.map((one) => `exp(${whole(one)})`).join(" + ")})`];
    },
    weigh: ({ of, r, c, numbers }) => {
      const [size] = numbers("size"), [heads] = numbers("heads"), [groups] = numbers("groups"), starts = numbers("starts");
      const mine = starts.findLastIndex((one) => one <= r), first = mine * (heads + 1), head = Math.floor(c / size);
      const weights = of(first + head)[r - starts[mine]].filter((one) => one.textContent);
      const column = Math.floor((head * groups) / heads) * size + (c % size), values = of(first + heads);
      const met = weights.map((_, p) => values[p][column]);
      return [weights, met, times(weights, met)];
    },
  };
  function explain(cell) {
    forget();
    const table = cell.closest("[data-how]"), picture = cell.closest(".picture"), row = cell.closest("tr"), data = table.dataset;
    const names = (data.of || "").split(" ").map((one) => one.split(":"));
    const of = (index) => {
      const other = names[index][0] && picture.querySelector(`[data-m="${names[index][0]}"]`);
      return other && all("tbody tr", other).map((line) => all("td", line));
    };
    const numbers = (key) => (data[key] || "").split(" ").map(Number);
    const r = all("tbody tr", table).indexOf(row) - (+data.skip || 0), c = all("td", row).indexOf(cell);
    const how = cell.classList.contains("kept") ? "kept" : data.how;
    const [lit, others, sum] = HOW[how]({ of, r, c, at: names.map((one) => +(one[1] || 0)), numbers, table });
    cell.classList.add("made");
    for (const one of lit) one.classList.add("lit");
    for (const one of others) one.classList.add("with");
    marked.push(cell, ...lit, ...others);
    const told = document.createElement("strong");
    told.textContent = `${data.name}, row ${r}, column ${c}: ${whole(cell)}`;
    picture.closest(".view").querySelector(".readout").replaceChildren(told, ` = ${sum}`);
  }
  const numberOf = (event) => event.target.closest?.("[data-how] td");
  for (const kind of ["pointerover", "click", "focusin"])
    listen(document, kind, (event) => numberOf(event)?.textContent && explain(numberOf(event)));
  listen(document, "keydown", (event) => {  // a matrix is one stop of Tab; arrows go on from number to number
    const cell = numberOf(event), by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!cell || !by) return;
    const rows = all("tbody tr", cell.closest("table")).map((line) => all("td", line));
    const r = rows.findIndex((line) => line.includes(cell)), to = rows[r + by[0]]?.[rows[r].indexOf(cell) + by[1]];
    if (to) { cell.tabIndex = -1; to.tabIndex = 0; to.focus(); }
    event.preventDefault();
  });
  for (const table of all("[data-how]")) { const first = table.querySelector("td"); if (first) first.tabIndex = 0; }

  // Sound or broken; and the quiz.
  function chooseLeak(index) { for (const part of all("[data-choice]")) part.hidden = part.dataset.choice !== index; }
  for (const radio of all("input[name=leak]")) {
    radio.addEventListener("change", () => chooseLeak(radio.value));
    if (radio.checked) chooseLeak(radio.value);
  }
  const quiz = document.querySelector("input.quiz");
  if (quiz) {
    let right = 0, asked = 0;
    const score = () => { document.querySelector(".score").textContent = quiz.checked && asked ? `${right} of ${asked} right` : ""; };
    quiz.addEventListener("change", () => {
      right = asked = 0;
      for (const item of all(".ledger li")) {
        item.querySelector(".class").hidden = quiz.checked;
        item.querySelector(".guesses").hidden = !quiz.checked;
        item.querySelector(".guesses output").textContent = "";
        for (const button of all(".guess", item)) button.disabled = false;
      }
      score();
    });
    for (const button of all(".guess"))
      button.addEventListener("click", () => {
        const item = button.closest("li"), good = button.dataset.right === "yes";
        asked += 1;
        right += good;
        item.querySelector(".guesses output").textContent = good ? "right" : "no";
        item.querySelector(".class").hidden = false;
        for (const one of all(".guess", item)) one.disabled = true;
        score();
      });
  }

  let wasOpen = [];
  listen(window, "beforeprint", () => {
    wasOpen = isDeck ? [] : all("details:not([open])");
    for (const one of wasOpen) one.open = true;
    document.documentElement.classList.toggle("printing", isDeck);  // slides of the size of their paper
    if (isDeck) for (const one of views) fit(one);
  });
  listen(window, "afterprint", () => {
    for (const one of wasOpen) one.open = false;
    document.documentElement.classList.remove("printing");
    if (isDeck) fit(current);
  });
  listen(window, "hashchange", fromHash);
  document.documentElement.classList.add("script");
  for (const one of Object.values(players)) one.show(+one.bar.dataset.start);
  if (current) place(views.find((one) => one.id === document.body.dataset.start) || current);
  fromHash();
  history.scrollRestoration = "manual";
  listen(window, "load", () => {
    scrollTo(0, 0);  // a view is not at its place in the page
    document.querySelector("[autofocus]")?.scrollIntoView({ block: "center" });
  });
  left.addEventListener("abort", () => { for (const one of Object.values(players)) one.pause(); });
}
