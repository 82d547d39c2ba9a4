// Numbers and times as text, each with its unit. A missing value is a dash.

export const NONE = "–";
const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const isNone = (n) => n === null || n === undefined || Number.isNaN(n);
const format = (write) => (n) => (isNone(n) ? NONE : write(Number(n)));
const fixed = new Map();

function decimals(digits) {
  if (!fixed.has(digits)) fixed.set(digits, new Intl.NumberFormat("en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return fixed.get(digits);
}

export const count = format((n) => whole.format(Math.round(n)));
export const about = format((n) => (Math.abs(n) < 10_000 ? count(n) : compact.format(n)));
export const share = format((x) => `${(100 * x).toFixed(1)} %`);
export const number = (digits) => format((n) => decimals(digits).format(n));

export const ms = format((n) =>
  n < 10 ? `${n.toFixed(1)} ms` : n < 1000 ? `${n.toFixed(0)} ms` : seconds(n / 1000));
export const seconds = format((n) =>
  n < 120 ? `${n.toFixed(n < 10 ? 2 : 1)} s` : n < 7200 ? `${Math.round(n / 60)} min`
    : n < 172_800 ? `${(n / 3600).toFixed(1)} h` : `${(n / 86_400).toFixed(1)} days`);
export const bytes = format((n) =>
  n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : n >= 2 ** 20
    ? `${(n / 2 ** 20).toFixed(1)} MiB` : n >= 1024 ? `${(n / 1024).toFixed(1)} KiB`
    : `${Math.round(n)} B`);

// Dollars: the decimals that show the largest of the amounts to about three digits.
export function dollarsOf(amounts) {
  const most = Math.max(0, ...amounts.map((one) => Math.abs(Number(one ?? 0))));
  const digits = most >= 1 || most === 0 ? 2 : most >= 0.01 ? 4 : 6;
  return format((n) => `${n < 0 ? "−" : ""}$${decimals(digits).format(Math.abs(n))}`);
}
// For the scale of a chart: fewer decimals.
export function dollarScale(amounts) {
  const most = Math.max(0, ...amounts.map((one) => Math.abs(Number(one ?? 0))));
  const digits = most >= 10 || most === 0 ? 0 : most >= 0.5 ? 2 : most >= 0.05 ? 3 : most >= 0.005
    ? 4 : 6;
  return format((n) => `$${decimals(digits).format(n)}`);
}
export const dollars = (amount) => dollarsOf([amount])(amount);
export const price = format((micros) => `$${new Intl.NumberFormat("en", {
  minimumFractionDigits: 2, maximumFractionDigits: 6 }).format(micros / 1e6)}`);
export const fromPico = (pico) => (isNone(pico) ? null : pico / 1e12);

const pad = (n) => String(n).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const dated = (at) => (typeof at === "number" ? new Date(at) : new Date(at ?? NaN));
const written = (write) => (at) => {
  const date = dated(at);
  return Number.isNaN(date.getTime()) ? NONE : write(date);
};
export const day = written((d) => `${d.getDate()} ${MONTHS[d.getMonth()]}`);
export const clock = written((d) => `${pad(d.getHours())}:${pad(d.getMinutes())}`);
export const clockSeconds = written((d) =>
  `${pad(d.getHours())}:${pad(d.getMinutes())}:${pad(d.getSeconds())}`);
export const time = written((d) => `${day(d.getTime())} ${clock(d.getTime())}`);
const date = (d) => `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())}`;
export const instant = written((d) => date(d)
  + ` ${clockSeconds(d.getTime())}`);
export const moment = written((d) => `${day(d.getTime())} ${clockSeconds(d.getTime())}`);
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

export function ago(at, now = Date.now()) {
  const date = dated(at).getTime();
  if (Number.isNaN(date)) return NONE;
  const s = Math.max(0, (now - date) / 1000);
  return s < 5 ? "now" : `${seconds(s < 120 ? Math.round(s) : s).replace(/\.0+ /, " ")} ago`;
}
export const words = (name) => String(name).replaceAll("_", " ").replaceAll(".", " ");
