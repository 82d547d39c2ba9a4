// Elements from plain values. Text is always text: nothing is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => made(document.createElementNS(SVG, tag), attributes, children);
export const put = (parent, children) => parent.replaceChildren(...[children].flat(Infinity));
