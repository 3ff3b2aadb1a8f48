// One answer: its tokens in colour, its speed, and what is shown about a token. All text from the model
// becomes text nodes, never HTML.

export function element(tag, classes = "", text = "") {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text) made.textContent = text;
  return made;
}

const rounded = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });
const quoted = (text) => JSON.stringify(text); // shows spaces and line breaks

export class Answer {
  constructor(parent, title) {
    this.tokens = []; // {text, kind, place, count, rejected, span, logprob, top}
    this.content = "";
    this.steps = 0;
    this.accepted = 0;
    this.drafted = 0;
    this.first = 0; // milliseconds; when the first tokens arrived
    this.last = 0;
    this.numFirst = 0;
    this.began = performance.now();
    this.current = -1;
    this.described = 0; // tokens that have their log probabilities
    const box = element("section", "answer");
    const head = element("div", "answer-head");
    head.append(element("h3", "", title));
    this.speed = element("span", "speed", "…");
    head.append(this.speed);
    this.text = element("div", "answer-text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `${title}. Arrow keys go from token to token.`);
    this.facts = element("p", "facts");
    box.append(head, this.text, this.facts);
    parent.append(box);
    this.box = box;
  }

  // Adds an event of the stream.
  add(event) {
    for (const choice of event.choices) {
      this.content += choice.delta.content || "";
      const steps = choice.speculative_steps || [];
      const now = performance.now();
      for (const step of steps) this.addStep(step);
      if (steps.length) {
        if (!this.first) {
          this.first = now;
          this.numFirst = this.tokens.length;
        }
        this.last = now;
      }
      for (const entry of (choice.logprobs && choice.logprobs.content) || []) {
        const token = this.tokens[this.described++];
        if (token) Object.assign(token, { logprob: entry.logprob, top: entry.top_logprobs });
      }
    }
    this.showSpeed();
  }

  addStep(step) {
    const count = step.num_accepted + step.rejected.length;
    this.steps += 1;
    this.accepted += step.num_accepted;
    this.drafted += count;
    step.tokens.forEach((text, place) => {
      const isAccepted = place < step.num_accepted;
      const rejected = isAccepted ? [] : step.rejected;
      const kind = isAccepted ? "accepted" : rejected.length ? "replaced" : "drawn";
      const span = element("span", `token ${kind}`, text);
      span.dataset.index = this.tokens.length;
      this.tokens.push({ text, kind, place, count, rejected, span });
      if (text) this.text.append(span);
    });
  }

  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - this.numFirst) / seconds : 0;
  }

  get isComplete() {
    return this.tokens.length > 0;
  }

  showSpeed() {
    if (this.rate) this.speed.textContent = `${rounded(this.rate, 1)} tokens/s`;
  }

  // A sentence of figures, shown below the answer.
  finish() {
    if (!this.rate) this.speed.textContent = "";
    const wait = this.first ? `, the first after ${rounded(this.first - this.began, 0)} ms` : "";
    const perStep = rounded(this.steps ? this.tokens.length / this.steps : 0, 2);
    const share = this.drafted
      ? `, ${rounded((100 * this.accepted) / this.drafted, 0)} % of ${this.drafted} drafts accepted`
      : ", no drafts";
    const sentence =
      `${this.tokens.length} tokens${wait}; ${perStep} ${perStep === "1" ? "token" : "tokens"} a step${share}.`;
    this.facts.textContent = sentence;
    return sentence;
  }

  fail(message) {
    this.box.append(element("p", "fault", message));
    if (!this.rate) this.speed.textContent = "";
  }

  // --- one token -----------------------------------------------------------------------------------

  select(index) {
    this.leave();
    if (index < 0 || index >= this.tokens.length) return null;
    this.current = index;
    const token = this.tokens[index];
    token.span.classList.add("current");
    return token;
  }

  leave() {
    if (this.current >= 0) this.tokens[this.current].span.classList.remove("current");
    this.current = -1;
  }

  // The next token with text in a direction, or the present one at the end.
  next(direction) {
    let index = this.current + direction;
    if (this.current < 0) index = direction > 0 ? 0 : this.tokens.length - 1;
    while (this.tokens[index] && !this.tokens[index].text) index += direction;
    return this.tokens[index] ? index : this.current;
  }
}

// Sentences about where a token came from.
export function origin(token) {
  const draft = `draft ${token.place + 1} of ${token.count}`;
  if (token.kind === "accepted") return [`Drafted (${draft}) and accepted by the model.`];
  if (token.kind === "drawn") {
    const after = token.count ? "after all drafts of the step were accepted" : "without a draft";
    return [`Drawn by the model, ${after}.`];
  }
  const [first, ...others] = token.rejected;
  const sentences = [`Drawn by the model in place of the rejected draft ${quoted(first)}.`];
  if (others.length) sentences.push(`Drafts after it: ${others.map(quoted).join(" ")}.`);
  return sentences;
}

function likelihood(logprob) {
  return `${rounded(100 * Math.exp(logprob), 2)} % (log ${rounded(logprob, 3)})`;
}

// All that is known about a token, as one text for screen readers.
export function described(token) {
  const parts = [quoted(token.text), ...origin(token)];
  if (token.logprob !== undefined) parts.push(`Probability ${likelihood(token.logprob)}.`);
  return parts.join(" ");
}

// Fills `box` with all that is known about a token.
export function show(box, token) {
  const name = element("p");
  name.append(element("code", "", quoted(token.text)));
  box.replaceChildren(name, ...origin(token).map((sentence) => element("p", "", sentence)));
  if (token.logprob === undefined) return;
  box.append(element("p", "", `Probability ${likelihood(token.logprob)}`));
  if (!token.top || !token.top.length) return;
  const table = element("table");
  table.append(element("caption", "", "Most likely tokens"));
  for (const rival of token.top) {
    const row = table.insertRow();
    const head = element("th");
    head.scope = "row";
    head.append(element("code", "", quoted(rival.token)));
    row.append(head, element("td", "", likelihood(rival.logprob)));
  }
  box.append(table);
}
