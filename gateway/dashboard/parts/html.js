// Elements from templates: Preact, its hooks and htm. Values are text or elements, never markup.

import { Fragment, createContext, h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { createContext, render, Fragment };
export {
  useContext, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "../vendor/preact_hooks.js";
export const html = htm.bind(h);
