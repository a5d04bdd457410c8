
// The laboratory: a run is asked for beside the page, so that what is wrong is said where it was entered and the page
// stays; a run that went well is a link to go to. Without this the form does the same, by itself.
// ask    of a link: whether the run went well, and the text of its page; null where nobody answers
// go     to a link, whose page is the text
// gone   the sentence for nobody
function laboratory({ ask, go, gone }) {
  const drawer = document.querySelector(".settings");
  const kept = sessionStorage.getItem("form");  // as it was left in this tab
  if (kept) drawer.open = kept === "open" || drawer.querySelector(".problem") !== null;
  drawer.querySelector("summary").addEventListener("click", () => sessionStorage.setItem("form", drawer.open ? "closed" : "open"));
  const form = document.querySelector("#settings");
  const button = form.querySelector(".run"), state = form.querySelector(".state");
  const rows = all(".asked", form), more = form.querySelector(".more");
  const filled = (row) => row.querySelector("input[name=prompt]").value.trim();
  rows.forEach((row, index) => { row.hidden = index > 0 && !filled(row); });
  const anyHidden = () => rows.some((row) => row.hidden);
  more.hidden = !anyHidden();
  more.addEventListener("click", () => {
    const row = rows.find((one) => one.hidden);
    row.hidden = false;
    row.querySelector("input").focus();
    more.hidden = !anyHidden();
  });

  function complain(found) {
    for (const old of all(".problem", form)) old.remove();
    for (const field of all("[aria-invalid]", form)) { field.removeAttribute("aria-invalid"); field.removeAttribute("aria-describedby"); }
    let first = null;
    for (const [id, text] of found) {
      const field = document.getElementById(id), told = document.createElement("p");
      Object.assign(told, { className: "problem", id: `problem-${id}`, textContent: text });
      told.setAttribute("role", "alert");
      told.tabIndex = -1;
      if (field && form.contains(field)) {
        field.parentElement.append(told);
        field.setAttribute("aria-invalid", "true");
        field.setAttribute("aria-describedby", told.id);
        for (let one = field.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
        first ||= field;
      } else form.prepend(told);
    }
    (first || form.querySelector(".problem"))?.focus();
  }
  function close() {  // rows without a prompt are no requests: those below move up, so that letters and fields stay right
    const fields = (row) => all("input", row);
    const kept = rows.filter(filled).map((row) => fields(row).map((one) => one.value));
    if (!kept.length) return;
    rows.forEach((row, index) => {
      fields(row).forEach((one, place) => { one.value = kept[index]?.[place] ?? (place ? one.value : ""); });
      row.hidden = index >= kept.length;
    });
    more.hidden = !anyHidden();
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (state.textContent) return;
    close();
    const link = `?${new URLSearchParams(new FormData(form))}`;
    button.setAttribute("aria-disabled", "true");
    state.textContent = "The engine runs ...";
    const answer = await ask(link);
    button.removeAttribute("aria-disabled");
    state.textContent = "";
    if (!answer) return complain([["form", gone]]);
    if (answer.ok) {
      sessionStorage.setItem("ran", "yes");
      return go(link, answer.text);
    }
    const page = new DOMParser().parseFromString(answer.text, "text/html");
    const found = all(".problem", page).map((one) => [one.id.replace("problem-", ""), one.textContent]);
    complain(found.length ? found : [["form", answer.text.slice(0, 300)]]);
  });

  if (sessionStorage.getItem("ran")) {  // what came of it is where the keyboard goes on
    sessionStorage.removeItem("ran");
    const told = document.querySelector("#verdict") || document.querySelector("#result");
    if (told) { told.tabIndex = -1; told.focus({ preventScroll: true }); }
  }
}
