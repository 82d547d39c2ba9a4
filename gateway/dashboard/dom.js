// DOM elements from plain values. Text is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (name.startsWith("on")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

// Make these the children of `parent`. Equal elements stay in place and keep focus, scroll position,
// selection and open state; rows and branches are matched by `data-key`.
export function put(parent, children) {
  const focused = document.activeElement;
  children_of(parent, [children].flat(Infinity));
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

const HANDLERS = ["oninput", "onchange"];
const KEPT = ["open", "tabindex"]; // set on the shown element, not by its builder

function children_of(parent, fresh) {
  const keyed = new Map([...parent.children].filter((one) => one.dataset.key).map((one) => [one.dataset.key, one]));
  fresh.forEach((child, at) => {
    const there = parent.childNodes[at], same = keyed.get(child.dataset?.key) ?? there;
    if (!same || same.nodeName !== child.nodeName || same.dataset?.key !== child.dataset?.key) parent.insertBefore(child, there ?? null);
    else {
      if (same !== there) parent.insertBefore(same, there ?? null);
      become(same, child);
    }
  });
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
}

function become(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !KEPT.includes(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  old.style.cssText = fresh.style.cssText;
  for (const name of HANDLERS) old[name] = fresh[name];
  children_of(old, [...fresh.childNodes]);
}
