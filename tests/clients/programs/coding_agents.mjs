// Coding agents run their own loops over the scripted model: a question, a tool called twice, an
// answer. A recorder stands between them and the gateway and reads the cache header of each answer.
// Homes and folders are temporary, and every address but loopback is a proxy that does not exist.
import { spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer, request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { assert, check, key, lenientKey, model, url, versions } from './cases.mjs';

const RUN_MS = 90_000;
const NOWHERE = 'http://127.0.0.1:9';
const QUESTION = 'Run the probe';
const root = mkdtempSync(join(tmpdir(), 'trunkline-agents-'));
let records = [];

// --- the recorder --------------------------------------------------------------------------------

const recorder = createServer((asked, answer) => {
  const began = Date.now(), to = new URL(asked.url, url);
  const sent = { ...asked.headers, host: to.host };
  const passed = request(to, { method: asked.method, headers: sent }, (got) => {
    const counts = /read=(\d+); write=(\d+); fresh=(\d+)/.exec(got.headers['x-trunkline-cache']);
    const [read, write, fresh] = (counts ?? [0, 0, 0, 0]).slice(1).map(Number);
    records.push({
      method: asked.method, path: to.pathname, status: got.statusCode, ms: Date.now() - began,
      isHandshake: asked.headers.upgrade === 'websocket', read, prompt: read + write + fresh,
    });
    answer.writeHead(got.statusCode, got.headers);
    got.pipe(answer);
  });
  passed.on('error', () => answer.destroy());
  asked.pipe(passed);
});
await new Promise((ready) => recorder.listen(0, '127.0.0.1', ready));
const base = `http://127.0.0.1:${recorder.address().port}`;

// --- runs ----------------------------------------------------------------------------------------

function folder(...names) {
  const path = join(root, ...names);
  mkdirSync(path, { recursive: true });
  return path;
}

// Runs a program to its end in a folder; returns its output and what it asked.
async function run(agent, place, program, parameters, settings) {
  const home = folder(`home-${agent}`), cwd = folder(place);
  records = [];
  const child = spawn(join(process.cwd(), 'node_modules/.bin', program), parameters, {
    cwd,
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
    env: {
      PATH: process.env.PATH, LANG: 'C.UTF-8', HOME: home, TMPDIR: folder('tmp'),
      XDG_CONFIG_HOME: join(home, '.config'), XDG_DATA_HOME: join(home, '.local/share'),
      XDG_CACHE_HOME: join(home, '.cache'), XDG_STATE_HOME: join(home, '.local/state'),
      HTTP_PROXY: NOWHERE, HTTPS_PROXY: NOWHERE, NO_PROXY: '127.0.0.1,localhost',
      ...settings,
    },
  });
  let output = '', errors = '';
  child.stdout.on('data', (data) => (output += data));
  child.stderr.on('data', (data) => (errors += data));
  const late = setTimeout(() => process.kill(-child.pid, 'SIGKILL'), RUN_MS);
  const status = await new Promise((end) => child.on('close', end));
  clearTimeout(late);
  const most = Math.max(0, ...records.map((one) => one.prompt));
  return {
    output, records,
    told: `exit status ${status}: ${errors.slice(-200)} ${output.slice(-200)}`,
    isDone: status === 0 && output.includes('All done.'),
    turns: records.filter((one) => one.prompt > most / 2), // without requests for titles
  };
}

const count = (tokens) => tokens.toLocaleString('en-US');
const share = (turn) => `${count(turn.read)} of ${count(turn.prompt)}`;

// A session's loop, its second turn, and a second session in the same folder.
async function sessions(name, start) {
  const first = await start('work');
  await check(`${name}: loop`, async () => {
    assert(first.isDone, first.told);
    assert(first.turns.length === 3, `turns: ${first.turns.length}`);
    const refused = first.records.filter((one) => one.status !== 200);
    assert(!refused.length, `refused: ${JSON.stringify(refused)}`);
  });
  await check(`${name}: second turn`, async () => {
    const [one, two] = first.turns;
    assert(two?.read >= 0.95 * one.prompt, `read ${two?.read} of ${one?.prompt}`);
    return `prompt ${count(one.prompt)} tokens, second turn read ${share(two)}`;
  });
  const second = await start('work');
  await check(`${name}: new session`, async () => {
    assert(second.isDone, second.told);
    const [one] = second.turns;
    assert(one.read >= 0.9 * one.prompt, `read ${share(one)}`);
    return `read ${share(one)}`;
  });
}

// --- the agents ----------------------------------------------------------------------------------

const claudeSettings = {
  ANTHROPIC_BASE_URL: base, ANTHROPIC_API_KEY: key, DISABLE_AUTOUPDATER: '1',
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1', ENABLE_TOOL_SEARCH: 'false',
};
const claude = (place, more = ['--allowedTools', 'Bash'], settings = {}) =>
  run('claude', place, 'claude',
    ['-p', QUESTION, '--model', 'claude-sonnet-4-6', '--output-format', 'json', ...more],
    { ...claudeSettings, ...settings });

const provider = 'model_providers.trunkline';
const codex = (name, secret, ...more) => (place) =>
  run('codex', place, 'codex',
    ['exec', '--skip-git-repo-check', '--dangerously-bypass-approvals-and-sandbox', '--json',
      ...['analytics.enabled=false', 'check_for_update_on_startup=false',
        'model_provider=trunkline', `${provider}.name=trunkline`,
        `${provider}.base_url=${base}/v1`, `${provider}.env_key=TRUNKLINE_KEY`,
        `${provider}.wire_api=responses`, ...more].flatMap((setting) => ['-c', setting]),
      '-m', name, QUESTION],
    { CODEX_HOME: folder('home-codex', '.codex'), TRUNKLINE_KEY: secret });

const limit = { context: 262_144, output: 4_096 };
const served = {
  options: { baseURL: `${base}/v1`, apiKey: '{env:TRUNKLINE_KEY}' },
  models: { [model]: { name: model, limit } },
};
writeFileSync(
  join(folder('home-opencode', '.config', 'opencode'), 'opencode.json'),
  JSON.stringify({
    $schema: 'https://opencode.ai/config.json', autoupdate: false, share: 'disabled',
    provider: {
      trunkline: { npm: '@ai-sdk/openai-compatible', name: 'trunkline', ...served },
      openai: served,
    },
  }),
);
const opencode = (name) => (place) =>
  run('opencode', place, 'opencode',
    ['run', '--format', 'json', '-m', `${name}/${model}`, QUESTION],
    { TRUNKLINE_KEY: key, OPENCODE_DISABLE_AUTOUPDATE: '1', OPENCODE_DISABLE_MODELS_FETCH: '1',
      OPENCODE_DISABLE_LSP_DOWNLOAD: '1' });

// --- the cases -----------------------------------------------------------------------------------

versions('@anthropic-ai/claude-code', '@openai/codex', 'opencode-ai');
await sessions('claude code', claude);
await check('claude code: another folder', async () => {
  const still = '--exclude-dynamic-system-prompt-sections';
  const more = [still, '--allowedTools', 'Bash'];
  await claude('work', more);
  const { turns: [one], isDone, told } = await claude('elsewhere', more);
  assert(isDone, told);
  assert(one.read >= 0.9 * one.prompt, `read ${share(one)}`);
  return `with ${still} read ${share(one)}`;
});
await check('claude code: as it comes', async () => {
  const { isDone, told } = await claude('work', ['--allowedTools', 'Bash'], { ENABLE_TOOL_SEARCH: '' });
  assert(isDone, told);
});
await check('claude code: deferred tools', async () => {
  const found = await claude('work', ['--disallowedTools', 'Bash'], { ENABLE_TOOL_SEARCH: 'true' });
  assert(found.isDone, found.told);
  const refused = found.records.filter((one) => one.status !== 200);
  assert(!refused.length, `refused: ${JSON.stringify(refused)}`);
});
await sessions('codex, unknown model', codex(model, key));
await sessions('codex, known model', codex('gpt-5.5', lenientKey));
await check('codex: websockets', async () => {
  const found = await codex(model, key, `${provider}.supports_websockets=true`)('work');
  assert(found.isDone, found.told);
  const handshakes = found.records.filter((one) => one.isHandshake);
  assert(handshakes.length === 1, `handshakes: ${JSON.stringify(handshakes)}`);
});
await sessions('opencode, openai-compatible', opencode('trunkline'));
await sessions('opencode, openai', opencode('openai'));
recorder.closeAllConnections();
recorder.close();
rmSync(root, { recursive: true, force: true });
