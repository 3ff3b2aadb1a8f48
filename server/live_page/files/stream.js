// Speaks with the server: the model's name, the key, and chats as streams of events.

const KEY = "slipstream-key"; // in sessionStorage, which belongs to this tab and ends with it

export class KeyNeeded extends Error {}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function checked(reply) {
  if (reply.ok) return reply;
  if (reply.status === 401) throw new KeyNeeded("The server asks for an API key.");
  let message = `The server answered ${reply.status}.`;
  try {
    message = (await reply.json()).error.message || message;
  } catch {
    // not the server's own reply, but perhaps that of a proxy
  }
  throw new Error(message);
}

export async function modelName() {
  const reply = await checked(await fetch("v1/models", { headers: headers() }));
  return (await reply.json()).data[0].id;
}

// Yields the `data` of each event until [DONE]. `signal` ends the request, and so does closing the tab.
export async function* chat(body, signal) {
  const reply = await checked(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal,
    }),
  );
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The stream ended before its last event.");
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
