// Asks the server. With a token it is sent as the other servers want it, and kept for this tab alone.

import { useEffect, useState } from "./vendor/htm-preact.js";

const TOKEN = "search-r1-token";

export class NeedsToken extends Error {
  constructor(isWrong) {
    super(isWrong ? "This is not the token of this server." : "This server wants its token.");
    this.isWrong = isWrong;
  }
}

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

async function request(path, query, signal) {
  const all = Object.entries(query).flatMap(([name, values]) => [values].flat().map((value) => [name, value]));
  const kept = all.filter(([, value]) => value !== undefined && value !== null && value !== "");
  const token = sessionStorage.getItem(TOKEN);
  if (token && !/^[!-~]+$/.test(token)) throw new NeedsToken(true); // no header can hold what was copied along with it
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(`/api/${path}?${new URLSearchParams(kept)}`, { headers, signal });
  if (reply.status === 401) throw new NeedsToken(Boolean(token));
  if (!reply.ok) throw new Error(await reason(reply));
  return reply;
}

async function reason(reply) {
  const body = await reply.json().catch(() => ({}));
  if (Array.isArray(body.detail)) return body.detail.map((one) => `${one.loc.at(-1)}: ${one.msg}`).join("; ");
  return body.detail ?? `The server answered ${reply.status}.`;
}

export async function ask(path, query = {}, signal = undefined) {
  return (await request(path, query, signal)).json();
}

export async function download(path, query, name) {
  const url = URL.createObjectURL(await (await request(path, query)).blob());
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}

// { data, error, waiting }: asked again when the query or `version` changes; what was shown stays until then.
export function useData(path, query, version = "") {
  const [found, set] = useState({ waiting: true });
  const key = query && JSON.stringify(query);
  useEffect(() => {
    if (!query) return undefined;
    const stop = new AbortController();
    set((before) => ({ ...(before.key === key ? before : { data: before.data }), key, waiting: true }));
    ask(path, query, stop.signal).then(
      (data) => set({ key, data }),
      (error) => error.name === "AbortError" || set({ key, error }),
    );
    return () => stop.abort();
  }, [path, key, version]);
  return found;
}
