// A browser's side of web_app.py. A page shows what `show` is called with: the whole answer so far.

/** Send a message and show its answer. Make a new key for each message: crypto.randomUUID(). */
export const say = (chat, text, key, show) =>
  read(chat, { text: "", cursor: null }, show, { method: "POST", body: JSON.stringify({ text, key }) });

/** Follow a chat that GET /chats/{chat} has shown, behind its `text` and `cursor`. */
export const follow = (chat, { text, cursor }, show) => read(chat, { text, cursor }, show);

async function read(chat, seen, show, post) {
  for (let wait = 250; ; wait = Math.min(2 * wait, 10_000)) {
    try {
      const after = seen.cursor ? `?after=${encodeURIComponent(seen.cursor)}` : "";
      // Without a cursor the message is sent again. Its key makes it the same request.
      const answer = await (post && !after ? fetch(`/chats/${chat}`, post) : fetch(`/chats/${chat}/events${after}`));
      if (answer.status >= 400 && answer.status < 500) return { status: answer.status, ...(await answer.json()) };
      for await (const event of answer.ok ? events(answer.body) : []) {
        const data = JSON.parse(event.data);
        if (event.event === "end" || event.event === "failed") return data; // do not connect again
        seen.text = [...seen.text].slice(0, data.offset).join("") + data.text; // offsets count code points
        seen.cursor = event.id ?? seen.cursor;
        show(seen.text);
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // a TypeError of fetch: the network, or the server, is away
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", piece; !(piece = await reader.read()).done; ) {
    const found = (rest + piece.value).split(/\r?\n\r?\n/);
    rest = found.pop();
    for (const block of found) {
      const event = Object.fromEntries(block.split(/\r?\n/).map((line) => line.split(/: (.*)/, 2)));
      if (event.data) yield event; // others are pings
    }
  }
}
