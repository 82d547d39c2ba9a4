// Runs a client's cases and prints each as a line of JSON, for `tests.clients` to read.
// Arguments of a program: the gateway's URL, a key, a model's name, and a lenient key for those
// that need one. The packages are in the working folder.
import { createRequire } from 'node:module';
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

export const [url, key, model, lenientKey] = process.argv.slice(2);
const require = createRequire(process.cwd() + '/');
export const load = (name) => import(pathToFileURL(require.resolve(name)));

const tell = (found) => console.log('\n' + JSON.stringify(found));

// Prints the versions of packages, before the first case.
export function versions(...packages) {
  const found = {};
  for (const name of packages) {
    const file = `${process.cwd()}/node_modules/${name}/package.json`;
    found[name] = JSON.parse(readFileSync(file)).version;
  }
  tell({ versions: found });
}

// Runs a case; what `work` returns is told below the table. `theirs`: why it fails, if the reason
// is not Trunkline's.
export async function check(name, work, theirs = '') {
  let reason = '', told = '';
  try {
    told = (await work()) ?? '';
  } catch (error) {
    const cause = error?.responseBody ?? error?.cause?.message ?? '';
    const text = `${error?.name}: ${error?.message ?? error} ${cause}`;
    reason = text.replace(/\s+/g, ' ').slice(0, 600);
  }
  tell({ case: name, passed: reason === '', reason, theirs, told });
}

export function assert(truth, what) {
  if (!truth) throw new Error(what);
}
