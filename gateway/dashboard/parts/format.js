// Numbers and times as text, each with its unit. Times are the browser's local ones unless the name
// says UTC; they are given in milliseconds or in RFC 3339. A missing value is a dash.

export const NONE = "–";
export const isKnown = (v) => v !== null && v !== undefined;
const format = (write) => (n) => (isKnown(n) && !Number.isNaN(n) ? write(Number(n)) : NONE);

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const formats = new Map();
function decimals(least, most = least) {
  const name = `${least} ${most}`;
  if (!formats.has(name)) {
    formats.set(name, new Intl.NumberFormat("en", {
      minimumFractionDigits: least, maximumFractionDigits: most }));
  }
  return formats.get(name);
}

export const number = (digits) => format((n) => decimals(digits).format(n).replace("-", "−"));
export const count = number(0);
export const about = format((n) => (Math.abs(n) < 10_000 ? count(n) : compact.format(n)));
export const share = format((x) => `${number(1)(100 * x)} %`);
export const percent = format((x) => `${count(100 * x)} %`);

export const seconds = format((n) => {
  if (n < 120) return `${number(n < 10 ? 2 : 1)(n)} s`;
  if (n < 7200) return `${count(n / 60)} min`;
  return n < 172_800 ? `${number(1)(n / 3600)} h` : `${number(1)(n / 86_400)} days`;
});
export const ms = format((n) =>
  (n < 1000 ? `${number(n < 10 ? 1 : 0)(n)} ms` : seconds(n / 1000)));
export const bytes = format((n) => {
  if (n < 1024) return `${count(n)} B`;
  const power = n >= 2 ** 30 ? 3 : n >= 2 ** 20 ? 2 : 1;
  return `${number(1)(n / 1024 ** power)} ${["KiB", "MiB", "GiB"][power - 1]}`;
});

// The ledger counts in pico-dollars.
const PICO_DIGITS = 12;
// Return a writer of dollars with the decimals that show the largest amount to about three digits.
export function dollarsOf(amounts) {
  const most = Math.max(0, ...amounts.map((one) => Math.abs(Number(one ?? 0))));
  const digits = most >= 1 || most === 0 ? 2 : most >= 0.01 ? 4
    : Math.min(PICO_DIGITS, Math.max(6, 2 - Math.floor(Math.log10(most))));
  return format((n) => `${n < 0 ? "−" : ""}$${decimals(digits).format(Math.abs(n))}`);
}
export const dollars = (amount) => dollarsOf([amount])(amount);
// Dollars with all their decimals: prices, and the scale of a chart.
export const exactDollars = format((n) => `$${decimals(2, PICO_DIGITS).format(n)}`);
export const price = format((micros) => exactDollars(micros / 1e6));
export const fromPico = (pico) => (isKnown(pico) ? pico / 1e12 : null);

const pad = (n) => String(n).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const written = (write) => (at) => {
  const date = new Date(at ?? NaN);
  return Number.isNaN(date.getTime()) ? NONE : write(date);
};
export const day = written((d) => `${d.getDate()} ${MONTHS[d.getMonth()]}`);
export const clock = written((d) => `${pad(d.getHours())}:${pad(d.getMinutes())}`);
export const clockSeconds = written((d) => `${clock(d)}:${pad(d.getSeconds())}`);
export const time = written((d) => `${day(d)} ${clock(d)}`);
export const moment = written((d) => `${day(d)} ${clockSeconds(d)}`);
export const instant = written((d) =>
  `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())} ${clockSeconds(d)}`);
export const utcDay = written((d) => `${d.getUTCDate()} ${MONTHS[d.getUTCMonth()]}`);
export const iso = (at) => new Date(at).toISOString();
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
export const ago = written((d) => {
  const s = Math.max(0, (Date.now() - d.getTime()) / 1000);
  return s < 5 ? "now" : `${s < 120 ? `${count(s)} s` : seconds(s)} ago`;
});

export const words = (name) => String(name).replaceAll(/[_.]/g, " ");
