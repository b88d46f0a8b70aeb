// A browser's side of web_app.py. A page shows what `show` is called with: the whole answer so far.

/** Load a chat, `draw` it, and show what is under way until nothing is. Calls that wait for a person end it too. */
export async function load(chat, draw, show) {
  for (let wait = 250; ; wait = Math.min(2 * wait, 10_000)) {
    const answer = await reached(fetch(`/chats/${chat}`));
    if (answer?.status >= 400 && answer.status < 500) return refusal(answer); // 404: nothing was said yet
    const page = answer?.ok && (await reached(answer.json()));
    if (page) {
      draw(page);
      if (page.calls.length) return page;
      const { kind, error } = await follow(chat, page, show); // it ends at once if no run is under way
      if (page.activity === "idle" && !page.queued.length) return error ? { ...page, kind, error } : page; // it has failed
      wait = 1000; // a message may still wait
    }
    await pause(wait);
  }
}

/** Send a message and show its answer. Make a new key for each message: crypto.randomUUID(). */
export const say = (chat, text, key, show) => read(chat, { text: "", cursor: null }, show, "", { text, key });

/** Try again after an answer has failed. Make a new key for each click. */
export const retry = (chat, key, show) => read(chat, { text: "", cursor: null }, show, "/retry", { key });

/** Stop the answer under way. False if none has begun: ask again while you wait for one. */
export const stop = async (chat) => (await (await fetch(`/chats/${chat}/stop`, { method: "POST" })).json()).stopped ?? false;

/** Follow a chat that GET /chats/{chat} has shown, behind its `text` and `cursor`. */
export const follow = (chat, seen, show) => read(chat, seen, show);

/** Approve or deny the `calls` of what `load`, `say` or `follow` has returned, and show how the answer continues. */
export const decide = (chat, verb, seen, show) =>
  read(chat, seen, show, `/${verb}`, { calls: seen.calls.map((call) => call.id) });

async function read(chat, { text, cursor }, show, verb, body) {
  const headers = { "Content-Type": "application/json" };
  const post = body && { method: "POST", headers, body: JSON.stringify(body) };
  let after = post ? null : cursor;
  for (let wait = 250; ; wait = Math.min(2 * wait, 10_000)) {
    const query = after ? `?after=${encodeURIComponent(after)}` : "";
    // Without a cursor the request is sent again. A message is the same request by its key; a decision is 409 then.
    const sent = post && !after ? fetch(`/chats/${chat}${verb}`, post) : fetch(`/chats/${chat}/events${query}`);
    const answer = await reached(sent);
    if (answer?.status >= 400 && answer.status < 500) return refusal(answer);
    for await (const event of answer?.ok ? events(answer.body) : []) {
      const data = JSON.parse(event.data);
      after = event.id ?? after;
      if (event.event === "end" || event.event === "failed") return { ...data, text, cursor: after }; // do not reconnect
      text = [...text].slice(0, data.offset).join("") + data.text; // offsets count code points
      show(text);
    }
    await pause(wait);
  }
}

const pause = (wait) => new Promise((done) => setTimeout(done, wait));

/** Wait for fetch. A TypeError of it means that the network or the server is away: then there is nothing. */
const reached = (fetched) =>
  fetched.catch((error) => {
    if (!(error instanceof TypeError)) throw error;
  });

/** A proxy's refusal may have a body that is not JSON. */
const refusal = async (answer) => {
  const told = await answer.json().catch(() => ({ error: `HTTP ${answer.status}` }));
  return { status: answer.status, ...told };
};

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", piece; (piece = await reached(reader.read())) && !piece.done; ) {
    const found = (rest + piece.value).split(/\r?\n\r?\n/);
    rest = found.pop();
    for (const block of found) {
      const event = Object.fromEntries(block.split(/\r?\n/).map((line) => line.split(/: (.*)/, 2)));
      if (event.data) yield event; // others are pings
    }
  }
}
