// Dialogs: forms that act, confirmation by typing a name, and a key that is shown once.

import { html, useEffect, useRef, useState } from "./html.js";

export function Dialog({ title, close, children, isSticky }) {
  const box = useRef(null);
  useEffect(() => {
    const it = box.current;
    it.showModal();
    it.querySelector("form input, form select, .main")?.focus();
    return () => it.close();
  }, []);
  return html`<dialog ref=${box} aria-labelledby="dialog-title"
    onCancel=${(event) => { event.preventDefault(); if (!isSticky) close(); }}>
    <header><h2 id="dialog-title">${title}</h2>
      ${!isSticky && html`<button type="button" class="quiet" aria-label="Close"
        onClick=${close}>✕</button>`}
    </header>${children}</dialog>`;
}

function Control({ field, value, set, id }) {
  const hint = field.hint ? `${id}-hint` : undefined;
  if (field.kind === "select") return html`<select id=${id} aria-describedby=${hint} value=${value}
    onChange=${(event) => set(event.target.value)}>${field.options.map((one) => {
    const [name, text] = Array.isArray(one) ? one : [one, one];
    return html`<option value=${name} selected=${name === value}>${text}</option>`; })}</select>`;
  if (field.kind === "checks") return html`<div class="checks" role="group"
    aria-labelledby=${`${id}-label`}>
    ${field.options.map((one) => html`<label><input type="checkbox" checked=${value.includes(one)}
      onChange=${(event) => set(event.target.checked ? [...value, one]
        : value.filter((x) => x !== one))} />
      ${one}</label>`)}</div>`;
  const isNumber = field.kind === "number" || field.kind === "dollars";
  return html`<span class="with-unit">${field.kind === "dollars" && html`<span>$</span>`}
    <input id=${id} aria-describedby=${hint} type=${isNumber ? "number" : "text"} step=${field.step
      ?? "any"}
      min=${field.least} required=${field.isRequired} pattern=${field.pattern} autocomplete="off"
      spellcheck="false" value=${value} placeholder=${field.placeholder}
      onInput=${(event) => set(event.target.value)} />
    ${field.unit && html`<span>${field.unit}</span>`}</span>`;
}

// fields: {name, label, kind?: "text"|"number"|"dollars"|"select"|"checks", value?, hint?, unit?}.
// act(values): a promise; what it throws is shown. confirm: a name to type first.
export function Form({ fields = [], act, close, submit, isDangerous, confirm, children }) {
  const [values, setValues] = useState(() =>
    Object.fromEntries(fields.map((one) => [one.name, one.value ?? (one.kind === "checks" ? []
      : "")])));
  const [typed, setTyped] = useState(""), [error, setError] = useState(null), [isBusy,
    setBusy] = useState(false);
  const run = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try { await act(values); } catch (refused) { setError(refused); setBusy(false); }
  };
  return html`<form class="dialog-form" onSubmit=${run}>
    ${children}
    ${fields.map((field) => { const id = `field-${field.name}`; return html`<div class="field"
      key=${field.name}>
      ${field.kind === "checks" ? html`<span class="field-label"
        id=${`${id}-label`}>${field.label}</span>`
        : html`<label for=${id}>${field.label}</label>`}
      <${Control} id=${id} field=${field} value=${values[field.name]}
        set=${(value) => setValues({ ...values, [field.name]: value })} />
      ${field.hint && html`<p class="note" id=${`${id}-hint`}>${field.hint}</p>`}</div>`; })}
    ${confirm && html`<div class="field"><label for="field-confirm">Type <b>${confirm}</b> to
      confirm</label>
      <input id="field-confirm" autocomplete="off" spellcheck="false" value=${typed}
        onInput=${(event) => setTyped(event.target.value)} /></div>`}
    <p role="alert" class="bad">${error && (error.param ? `${error.param}: ${error.message}`
      : error.message)}</p>
    <div class="buttons"><button type="button" onClick=${close}>Cancel</button>
      <button class=${isDangerous ? "danger" : "main"}
        disabled=${isBusy || (confirm !== undefined && typed !== confirm)}>${submit}</button></div>
  </form>`;
}

export const whole = (text) => (text === "" || text === null || text === undefined ? null
  : Number(text));
export const micros = (text) => (whole(text) === null ? null : Math.round(Number(text) * 1e6));
