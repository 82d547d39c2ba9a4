// A new key: shown once, with what to paste into a program of each SDK.

import { html, useRef, useState } from "../html.js";
import { Dialog } from "./dialog.js";
import { Notice } from "../pieces.js";
import { useSession } from "../session.js";

const PROGRAMS = {
  OpenAI: ({ base, key, model }) => `from openai import OpenAI

client = OpenAI(
    base_url="${base}/v1",
    api_key="${key}")
answer = client.chat.completions.create(
    model="${model}", messages=[{"role": "user", "content": "Hello"}])
print(answer.choices[0].message.content)`,
  Anthropic: ({ base, key, model }) => `from anthropic import Anthropic

client = Anthropic(
    base_url="${base}",
    api_key="${key}")
answer = client.messages.create(
    model="${model}", max_tokens=100,
    messages=[{"role": "user", "content": "Hello"}])
print(answer.content[0].text)`,
  Gemini: ({ base, key, model }) => `from google import genai

client = genai.Client(
    api_key="${key}",
    http_options={"base_url": "${base}"})
answer = client.models.generate_content(model="${model}", contents="Hello")
print(answer.text)`,
  curl: ({ base, key, model }) => `curl ${base}/v1/chat/completions \\
  -H "Authorization: Bearer ${key}" \\
  -H "Content-Type: application/json" \\
  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello"}]}'`,
};

// The address of the public listener as this browser may reach it.
function publicAddress(listen) {
  const port = listen.slice(listen.lastIndexOf(":") + 1), host = listen.slice(0, -port.length - 1);
  const isLocal = ["0.0.0.0", "[::]", "127.0.0.1", "[::1]", "localhost"].includes(host);
  return `http://${isLocal ? location.hostname : host}:${port}`;
}

function Copyable({ text, label }) {
  const [told, tell] = useState(""), box = useRef(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      tell("Copied");
    } catch { // without https the clipboard is closed: select the text for the keyboard
      getSelection().selectAllChildren(box.current);
      tell("Selected: press Ctrl+C");
    }
  };
  return html`<div class="copyable"><pre ref=${box} tabindex="0" aria-label=${label}>${text}</pre>
    <button type="button" onClick=${copy}>Copy</button>
    <span role="status" class="soft">${told}</span></div>`;
}

function Program({ values }) {
  const [sdk, choose] = useState("OpenAI");
  return html`<div class="tabs" role="group" aria-label="SDK">
      ${Object.keys(PROGRAMS).map((one) => html`<button type="button" aria-pressed=${one === sdk}
        onClick=${() => choose(one)}>${one}</button>`)}</div>
    <${Copyable} key=${sdk} text=${PROGRAMS[sdk](values)} label=${`Program for ${sdk}`} />`;
}

// made: the answer that has the key.
export function NewSecret({ made, close }) {
  const { server } = useSession().me;
  const values = { base: publicAddress(server.public), key: made.key, model: server.model };
  return html`<${Dialog} title="The new key">
    <${Notice}>This key is shown once and cannot be shown again. Keep it now.<//>
    <${Copyable} text=${made.key} label="The key" />
    ${made.tenant === null
      ? html`<p>An administrator's key: it signs in to this dashboard and to the admin API, and
        cannot generate.</p>`
      : html`<${Program} values=${values} />`}
    <div class="buttons"><button type="button" class="main" onClick=${close}>I have kept
      it</button></div>
  <//>`;
}
