// The page /live: sends messages, shows answers, asks for the key, and reacts to pointer and keyboard.

import { Answer, described, element, show } from "./answer.js";
import { startCharts } from "./charts.js";
import { KeyNeeded, chat, hasKey, keepKey, modelName } from "./stream.js";

const $ = (id) => document.getElementById(id);
const answers = new WeakMap(); // element of an answer's text -> Answer
let messages = []; // the conversation so far, as the API takes it
let model = null;
let running = null; // AbortController of the answer in progress
const TOP_LOGPROBS = 4;

function say(text) {
  $("status").textContent = text;
}

// --- the key ---------------------------------------------------------------------------------------

// Asks for a key; true once one was entered.
function askForKey() {
  const dialog = $("key-dialog");
  $("key-fault").hidden = !hasKey();
  $("key").value = "";
  return new Promise((resolve) => {
    let given = false;
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      keepKey($("key").value.trim());
      given = true;
      dialog.close();
    };
    $("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(given);
    dialog.showModal();
  });
}

// What `work` returns; asks for a key as long as the server wants another one.
async function withKey(work) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof KeyNeeded) || !(await askForKey())) throw error;
    }
  }
}

async function connect() {
  if (model === null) model = await withKey(modelName);
  $("server").textContent = `Model ${model}`;
}

// --- answers ---------------------------------------------------------------------------------------

function request(more) {
  const body = {
    model,
    messages,
    stream: true,
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    ...more,
    speculative: { steps: true, ...more.speculative },
  };
  // Not in a comparison of speeds, because they make steps slower.
  if ($("logprobs").checked && !$("compare").checked) {
    Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  }
  return body;
}

async function stream(parent, title, more) {
  const answer = new Answer(parent, title);
  answers.set(answer.text, answer);
  const log = $("log");
  try {
    for await (const event of chat(request(more), running.signal)) {
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      answer.add(event);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error instanceof KeyNeeded) {
      answer.box.remove();
      throw error;
    }
    answer.fail(error.name === "AbortError" ? "Stopped." : error.message);
    answer.failed = true;
  }
  answer.sentence = answer.finish();
  return answer;
}

function compared(withDrafts, without) {
  if (withDrafts.failed || without.failed || !withDrafts.rate || !without.rate) return "";
  const times = (withDrafts.rate / without.rate).toFixed(2);
  const drawn = Number($("temperature").value) > 0 ? ", because each was drawn anew" : "";
  const isSame = withDrafts.content === without.content;
  const same = isSame ? "The texts are equal." : `The texts differ${drawn}.`;
  return `With drafts, the tokens came ${times} times as fast as without. ${same}`;
}

async function answerTurn(turn) {
  const wantsBoth = $("compare").checked;
  const row = element("div", wantsBoth ? "answers pair" : "answers");
  turn.append(row);
  const title = wantsBoth ? "With drafts" : "Answer";
  const first = await withKey(() => stream(row, title, {}));
  let sentence = first.sentence;
  if (wantsBoth && !running.signal.aborted) {
    say("Answering again without drafts …");
    // Afterwards, not at once: two requests in one batch would slow each other down.
    const off = { speculative: { enabled: false } };
    const second = await stream(row, "Without drafts", off);
    const verdict = compared(first, second);
    if (verdict) turn.append(element("p", "verdict", verdict));
    sentence = verdict || sentence;
  }
  if (first.content) messages.push({ role: "assistant", content: first.content });
  else messages.pop();
  return first.failed ? "No complete answer." : `Answer complete. ${sentence}`;
}

function busy(isBusy) {
  $("send").disabled = isBusy;
  $("clear").disabled = isBusy;
  $("stop").disabled = !isBusy;
  $("log").setAttribute("aria-busy", String(isBusy)); // screen readers read the answer once, at its end
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running || !$("form").reportValidity()) return;
  running = new AbortController();
  busy(true);
  say("Answering …");
  $("empty").hidden = true;
  const turn = element("article", "turn");
  turn.append(element("p", "question", text));
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  messages.push({ role: "user", content: text });
  try {
    await connect();
    $("prompt").value = "";
    say(await answerTurn(turn));
  } catch (error) {
    messages.pop();
    turn.append(element("p", "fault", error.message));
    say("No answer.");
  } finally {
    running = null;
    busy(false);
  }
}

// --- what is shown about a token -----------------------------------------------------------------

let shown = null; // the Answer with the token that the detail is about

function hide() {
  $("detail").hidden = true;
  if (shown) shown.leave();
  shown = null;
}

function reveal(answer, index, speaks) {
  if (shown && shown !== answer) shown.leave();
  const token = answer.select(index);
  if (!token) return hide();
  shown = answer;
  const box = $("detail");
  show(box, token);
  box.hidden = false;
  if (speaks) {
    token.span.scrollIntoView({ block: "nearest" });
    $("spoken").textContent = described(token);
  }
  const place = token.span.getBoundingClientRect();
  const left = Math.min(place.left, window.innerWidth - box.offsetWidth - 8);
  const below = place.bottom + 6;
  const above = Math.max(8, place.top - box.offsetHeight - 6);
  box.style.left = `${Math.max(8, left)}px`;
  box.style.top = `${below + box.offsetHeight < window.innerHeight ? below : above}px`;
}

function answerOf(node) {
  const text = node instanceof Element ? node.closest(".answer-text") : null;
  return text ? answers.get(text) : null;
}

for (const kind of ["pointerover", "click"]) {
  $("log").addEventListener(kind, (event) => {
    const answer = answerOf(event.target);
    const index = event.target.dataset && event.target.dataset.index;
    if (answer && index !== undefined) reveal(answer, Number(index), false);
    else hide();
  });
}
$("log").addEventListener("pointerleave", hide);
$("log").addEventListener("focusout", hide);
$("log").addEventListener("scroll", () => shown && document.activeElement !== shown.text && hide());
$("log").addEventListener("keydown", (event) => {
  const answer = answerOf(event.target);
  if (!answer || !answer.isComplete) return;
  const moves = {
    ArrowRight: () => answer.next(1),
    ArrowDown: () => answer.next(1),
    ArrowLeft: () => answer.next(-1),
    ArrowUp: () => answer.next(-1),
    Home: () => 0,
    End: () => answer.tokens.findLastIndex((token) => token.text),
  };
  if (event.key === "Escape") hide();
  else if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    reveal(answer, moves[event.key](), true);
  }
});

// --- controls --------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("compare").addEventListener("change", () => {
  $("logprobs").disabled = $("compare").checked;
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  messages = [];
  hide();
  for (const turn of [...$("log").querySelectorAll(".turn")]) turn.remove();
  $("empty").hidden = false;
  say("");
  $("prompt").focus();
});
window.addEventListener("pagehide", () => running && running.abort());

startCharts($("charts"));
connect().catch((error) => {
  $("server").textContent = error.message;
});
