// Numbers for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);

// Short enough for the side of a chart: 0.42, 128, 10k.
export const axis = (number) => (number >= 10000 ? `${number / 1000}k` : short.format(number));

// Three digits or so: 0.42, 7.3, 128.
export function rate(number) {
  if (number === 0 || number >= 100) return whole.format(number);
  return number >= 1 ? tenths.format(number) : number.toPrecision(1);
}

export function duration(seconds) {
  if (seconds < 1) return `${whole.format(1000 * seconds)} ms`;
  return seconds < 10 ? `${tenths.format(seconds)} s` : `${whole.format(seconds)} s`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

// The least round number that is not below a number: where an axis ends.
export function niceAtLeast(number) {
  const power = 10 ** Math.floor(Math.log10(Math.max(number, 1e-9)));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= number * (1 - 1e-9));
}
