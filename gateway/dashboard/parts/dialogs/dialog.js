// Dialogs: forms that act, and confirmation by typing a name.

import { html, useEffect, useRef, useState } from "../html.js";
import { Select } from "../pieces.js";

// Without `close` it stays until its content ends it.
export function Dialog({ title, close, children }) {
  const box = useRef(null);
  useEffect(() => {
    const it = box.current;
    it.showModal();
    it.querySelector("form input, form select, .main")?.focus();
    return () => it.close();
  }, []);
  const cancel = (event) => { event.preventDefault(); close?.(); };
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onCancel=${cancel}>
    <header><h2 id="dialog-title">${title}</h2>
      ${close && html`<button type="button" class="quiet" aria-label="Close"
        onClick=${close}>✕</button>`}</header>
    ${children}</dialog>`;
}

const TYPES = { text: "text", number: "number", dollars: "number", time: "datetime-local" };

function Checks({ id, options, value, set }) {
  const toggle = (one, isOn) => set(isOn ? [...value, one] : value.filter((x) => x !== one));
  return html`<div class="checks" role="group" aria-labelledby=${`${id}-label`}>
    ${options.map((one) => html`<label><input type="checkbox" checked=${value.includes(one)}
      onChange=${(event) => toggle(one, event.target.checked)} /> ${one}</label>`)}</div>`;
}

function Control({ field, value, set, id }) {
  const { kind = "text", options } = field, hint = field.hint ? `${id}-hint` : undefined;
  if (kind === "checks") {
    return html`<${Checks} id=${id} options=${options} value=${value} set=${set} />`;
  }
  if (kind === "select") {
    return html`<${Select} id=${id} options=${options} value=${value} set=${set}
      aria-describedby=${hint} />`;
  }
  return html`<span class="with-unit">${kind === "dollars" && html`<span>$</span>`}
    <input id=${id} aria-describedby=${hint} type=${TYPES[kind]} step=${field.step ?? "any"}
      min=${field.least} required=${field.isRequired} pattern=${field.pattern} autocomplete="off"
      spellcheck="false" value=${value} placeholder=${field.placeholder}
      onInput=${(event) => set(event.target.value)} />
    ${field.unit && html`<span>${field.unit}</span>`}</span>`;
}

function Field({ field, value, set }) {
  const id = `field-${field.name}`;
  return html`<div class="field">
    ${field.kind === "checks" ? html`<span class="field-label" id=${`${id}-label`}>${
      field.label}</span>` : html`<label for=${id}>${field.label}</label>`}
    <${Control} id=${id} field=${field} value=${value} set=${set} />
    ${field.hint && html`<p class="note" id=${`${id}-hint`}>${field.hint}</p>`}</div>`;
}

// fields: {name, label, kind?, value?, hint?, unit?, placeholder?, isRequired?, least?, step?,
// pattern?, options?}; kind: "text", "number", "dollars", "time", "select" or "checks".
// act(values): a promise; what it throws is shown. done(answer): called with what it returns.
// confirm: a name to type first.
export function FormDialog({ title, close, fields = [], act, done, submit, isDangerous, confirm,
  children }) {
  const [values, setValues] = useState(() => Object.fromEntries(
    fields.map((one) => [one.name, one.value ?? (one.kind === "checks" ? [] : "")])));
  const [typed, setTyped] = useState(""), [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const run = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try { done(await act(values)); } catch (refused) { setError(refused); setBusy(false); }
  };
  return html`<${Dialog} title=${title} close=${close}><form class="dialog-form" onSubmit=${run}>
    ${children}
    ${fields.map((field) => html`<${Field} key=${field.name} field=${field}
      value=${values[field.name]}
      set=${(value) => setValues((old) => ({ ...old, [field.name]: value }))} />`)}
    ${confirm && html`<div class="field">
      <label for="field-confirm">Type <b>${confirm}</b> to confirm</label>
      <input id="field-confirm" autocomplete="off" spellcheck="false" value=${typed}
        onInput=${(event) => setTyped(event.target.value)} /></div>`}
    <p role="alert" class="bad">${error && `${error.param ? `${error.param}: ` : ""}${
      error.message}`}</p>
    <div class="buttons"><button type="button" onClick=${close}>Cancel</button>
      <button class=${isDangerous ? "danger" : "main"}
        disabled=${isBusy || (confirm !== undefined && typed !== confirm)}>${submit}</button></div>
  </form><//>`;
}

// A field's number, in micro-dollars too; null for an empty one.
export const toNumber = (text) => (text === "" ? null : Number(text));
export const toMicros = (text) => (text === "" ? null : Math.round(Number(text) * 1e6));
