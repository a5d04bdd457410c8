
// The laboratory of a server: it computes a link's page, and a page is left for the next.
begin(new AbortController().signal);
laboratory({
  gone: "The laboratory does not answer: does lfm2np lab still run?",
  async ask(link) {
    try {
      const answer = await fetch(link);
      return { ok: answer.ok, text: await answer.text() };
    } catch {
      return null;
    }
  },
  go(link) {
    if (link === location.search) location.reload();
    else location.assign(link + location.hash);
  },
});
