// OpenAI's Agents SDK for JavaScript over the scripted model, on responses and on chat.
import { assert, check, key, load, model, url, versions } from './cases.mjs';

const {
  Agent, MemorySession, OpenAIChatCompletionsModel, OpenAIConversationsSession,
  OpenAIResponsesModel, handoff, run, setTracingDisabled, tool,
} = await load('@openai/agents');
const { default: OpenAI } = await load('openai');
setTracingDisabled(true);
versions('@openai/agents', 'openai');

const client = new OpenAI({ apiKey: key, baseURL: `${url}/v1` });
const models = {
  responses: () => new OpenAIResponsesModel(client, model),
  chat: () => new OpenAIChatCompletionsModel(client, model),
};
const rules = Array.from({ length: 150 }, (_, n) => `Rule ${n}: answer briefly about item ${n}.`);
const weather = () => tool({
  name: 'get_weather', description: 'Tells the weather of a city', strict: false,
  parameters: {
    type: 'object', properties: { city: { type: 'string' } }, required: ['city'],
    additionalProperties: true,
  },
  execute: async ({ city }) => `sunny in ${city}`,
});
const cached = (response) => response.usage.inputTokensDetails.at(-1)?.cached_tokens ?? 0;

for (const [api, make] of Object.entries(models)) {
  const agent = (more = {}) =>
    new Agent({ name: 'agent', instructions: rules.join(' '), model: make(), ...more });
  await check(`${api}: run`, async () => {
    const { finalOutput } = await run(agent(), 'Hello');
    assert(finalOutput.includes('All done'), finalOutput);
  });
  await check(`${api}: tools`, async () => {
    const found = await run(agent({ tools: [weather()] }), 'What is the weather?');
    const results = found.newItems.filter((item) => item.type === 'tool_call_output_item');
    assert(results.length === 2, `results: ${results.length}`);
    assert(cached(found.rawResponses.at(-1)) > 1000, 'the last turn read too little');
  });
  await check(`${api}: stream`, async () => {
    const found = await run(agent(), 'Hello', { stream: true });
    let events = 0;
    for await (const event of found) events += event ? 1 : 0;
    await found.completed;
    assert(events > 0 && found.finalOutput.includes('All done'), found.finalOutput);
  });
  await check(`${api}: stream with tools`, async () => {
    const found = await run(agent({ tools: [weather()] }), 'And now?', { stream: true });
    let calls = 0;
    for await (const event of found) calls += event.name === 'tool_called' ? 1 : 0;
    await found.completed;
    assert(calls === 2 && found.finalOutput.includes('All done'), `calls: ${calls}`);
  });
  await check(`${api}: session`, async () => {
    const session = new MemorySession();
    await run(agent(), 'One', { session });
    const { rawResponses } = await run(agent(), 'Two', { session });
    assert(cached(rawResponses.at(-1)) > 1000, 'the second turn read too little');
  });
  await check(`${api}: handoff`, async () => {
    const other = new Agent({ name: 'other', instructions: 'Help.', model: make() });
    const { finalOutput } = await run(agent({ handoffs: [handoff(other)] }), 'Hello');
    assert(finalOutput.includes('All done'), finalOutput);
  });
  await check(`${api}: settings`, async () => {
    const modelSettings = {
      temperature: 0, reasoning: { effort: 'low', summary: 'auto' }, text: { verbosity: 'low' },
      truncation: 'auto', store: true, maxTokens: 50, parallelToolCalls: false,
      promptCacheRetention: '24h',
    };
    const { finalOutput } = await run(agent({ modelSettings }), 'Hello');
    assert(finalOutput.includes('All done'), finalOutput);
  });
}
await check('responses: previous response', async () => {
  const agent = new Agent({
    name: 'agent', instructions: rules.join(' '), model: models.responses(),
  });
  const first = await run(agent, 'One');
  const second = await run(agent, 'Two', { previousResponseId: first.lastResponseId });
  assert(cached(second.rawResponses[0]) > 1000, 'the second turn read too little');
});
await check('responses: conversation', async () => {
  const session = new OpenAIConversationsSession({ client });
  const agent = new Agent({ name: 'agent', model: models.responses(), tools: [weather()] });
  await run(agent, 'One', { session });
  const { finalOutput } = await run(agent, 'Two', { session });
  assert(finalOutput.includes('All done'), finalOutput);
});
process.exit(0);
