// Elements from templates: Preact, its hooks and htm. Values are text or elements, never markup.

import { createContext, h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { createContext, render };
export {
  useContext, useEffect, useLayoutEffect, useReducer, useRef, useState,
} from "../vendor/preact_hooks.js";
export const html = htm.bind(h);
