// The keyboard. All that is done here can be done without it; htmx does what is live.
(() => {
  "use strict";
  const typing = (element) => element.closest("input, textarea, select, [contenteditable]");
  const rows = () => [...document.querySelectorAll("[data-row]")].filter((row) => row.checkVisibility());

  function move(step) {
    const all = rows();
    const at = all.indexOf(document.activeElement.closest("[data-row]"));
    const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step];
    if (next) {
      next.focus();
      next.scrollIntoView({ block: "nearest" });
    }
  }

  function openRow(row) {
    const details = row.querySelector("details");
    if (details) details.open = !details.open;
  }

  function toggleHelp() {
    const help = document.getElementById("keys");
    help.open = !help.open;
    if (help.open) help.scrollIntoView({ block: "end" });
  }

  const follow = (selector) => document.querySelector(selector)?.click();
  const actions = {
    "/": () => document.querySelector("[role=search] input").select(),
    j: () => move(1),
    k: () => move(-1),
    "[": () => follow(".versions [rel=prev]"),
    "]": () => follow(".versions [rel=next]"),
    "?": toggleHelp,
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return event.target.blur();
    if (typing(event.target)) {
      const isSent = event.key === "Enter" && !event.shiftKey && event.target.matches(".write textarea");
      if (isSent && !event.isComposing) {
        event.preventDefault();
        event.target.form.requestSubmit();
      }
      return;
    }
    if (event.key === "Enter" && event.target.matches("article[data-row], section[data-row]")) return openRow(event.target);
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });

  // A menu closes when something else is clicked; only one is open at a time.
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.open = false;
    }
  });

  // Whether the page hears of news. The colour of the mark tells it, and its title in words.
  const live = document.getElementById("live");
  const tell = (isLive) => {
    live?.classList.toggle("off", !isLive);
    live?.setAttribute("title", isLive ? "connected" : "not connected, trying again");
  };
  document.addEventListener("htmx:sse:after:connection", () => tell(true));
  document.addEventListener("htmx:sse:error", () => tell(false));
  document.addEventListener("htmx:sse:before:connection", (event) => tell(event.detail.connection.attempt === 0));

  // The line of versions may be wider than the page: it is shown where the current one is.
  const line = document.querySelector(".track");
  const current = line?.querySelector("[aria-current]");
  if (current) line.scrollLeft = current.parentElement.offsetLeft - line.offsetLeft - line.clientWidth / 2;
})();
