// The AI SDK's four providers against a gateway: unary, streams, tools, objects and settings.
import { assert, check, key, load, model, url, versions } from './cases.mjs';

const { APICallError, generateObject, generateText, stepCountIs, streamText, tool } =
  await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { createAnthropic } = await load('@ai-sdk/anthropic');
const { createGoogleGenerativeAI } = await load('@ai-sdk/google');
const { z } = await load('zod');
versions('ai', '@ai-sdk/openai', '@ai-sdk/anthropic', '@ai-sdk/google');

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const compatible = createOpenAICompatible({
  name: 'trunkline', baseURL: `${url}/v1`, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
const google = createGoogleGenerativeAI({ baseURL: `${url}/v1beta`, apiKey: key });
const models = {
  'openai responses': openai.responses(model),
  'openai chat': openai.chat(model),
  'openai-compatible': compatible(model),
  anthropic: anthropic(model),
  google: google(model),
};
const hints = {
  'openai responses': { openai: { store: true, serviceTier: 'flex', metadata: { a: 'b' },
    reasoningEffort: 'low', textVerbosity: 'low', truncation: 'auto' } },
  'openai chat': { openai: { store: true, serviceTier: 'flex', reasoningEffort: 'low',
    textVerbosity: 'low' } },
  'openai-compatible': { trunkline: { reasoningEffort: 'low' } },
  anthropic: { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 }, effort: 'low' } },
  google: { google: { thinkingConfig: { thinkingBudget: 0 } } },
};
const weather = () => tool({
  description: 'Tells the weather of a city',
  inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }),
  execute: async () => 'sunny',
});
const settings = { maxOutputTokens: 12, maxRetries: 0 };
const long = 'word '.repeat(9000);

for (const [name, served] of Object.entries(models)) {
  await check(`${name}: unary`, async () => {
    const { text, usage } = await generateText({ model: served, prompt: 'Hello', ...settings });
    assert(text.length > 0 && usage.inputTokens > 0, 'no text or no usage');
  });
  await check(`${name}: stream`, async () => {
    let failure;
    const result = streamText({
      model: served, prompt: 'Hello', ...settings, onError: ({ error }) => (failure = error),
    });
    let text = '';
    for await (const piece of result.textStream) text += piece;
    if (failure) throw failure;
    assert(text.length > 0, 'no text');
    assert((await result.usage).inputTokens > 0, 'no usage');
  });
  await check(`${name}: second turn`, async () => {
    const messages = [{ role: 'user', content: 'Hello' }];
    const first = await generateText({
      model: served, messages, ...settings, providerOptions: { openai: { store: false } },
    });
    messages.push(...first.response.messages, { role: 'user', content: 'And then?' });
    const second = await generateText({
      model: served, messages, ...settings, providerOptions: { openai: { store: false } },
    });
    assert(second.text.length > 0, 'no text');
  });
  await check(`${name}: tool and its result`, async () => {
    const { steps } = await generateText({
      model: served, prompt: 'What is the weather in Paris?', ...settings, maxOutputTokens: 60,
      temperature: 0, tools: { weather: weather() }, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({
        toolChoice: stepNumber === 0 ? { type: 'tool', toolName: 'weather' } : 'none',
      }),
      providerOptions: { openai: { store: false } },
    });
    assert(steps.length === 2, `steps: ${steps.length}, ${steps[0].finishReason}`);
    assert(steps[0].toolCalls[0].toolName === 'weather', 'another tool');
  });
  await check(`${name}: object`, async () => {
    const { object } = await generateObject({
      model: served, prompt: 'A number', schema: z.object({ n: z.number().int() }), ...settings,
      maxOutputTokens: 60,
    });
    assert(Number.isInteger(object.n), 'no number');
  });
  await check(`${name}: hints`, async () => {
    const { text } = await generateText({
      model: served, prompt: 'Hello', ...settings, providerOptions: hints[name],
    });
    assert(text.length > 0, 'no text');
  });
  await check(`${name}: overflow`, async () => {
    try {
      await generateText({ model: served, prompt: long, ...settings });
    } catch (error) {
      assert(APICallError.isInstance(error), `another error: ${error}`);
      assert(error.statusCode === 400 && !error.isRetryable, `status ${error.statusCode}`);
      assert(/too long|exceed/i.test(error.message), error.message);
      return;
    }
    throw new Error('no error');
  });
}
await check('openai responses: second turn without store: false', async () => {
  const messages = [{ role: 'user', content: 'Hello' }];
  const first = await generateText({ model: openai(model), messages, ...settings });
  messages.push(...first.response.messages, { role: 'user', content: 'And then?' });
  await generateText({ model: openai(model), messages, ...settings });
});
await check('anthropic: cache control', async () => {
  const marked = { anthropic: { cacheControl: { type: 'ephemeral' } } };
  const text = 'A shared beginning. '.repeat(120);
  const messages = [
    { role: 'system', content: text, providerOptions: marked },
    { role: 'user', content: 'Hello' },
  ];
  await generateText({ model: models.anthropic, messages, ...settings, allowSystemInMessages: true });
  const second = await generateText({
    model: models.anthropic, messages, ...settings, allowSystemInMessages: true,
  });
  const read = second.usage.cachedInputTokens ?? second.usage.inputTokenDetails?.cacheReadTokens;
  assert(read > 0, `cached tokens: ${read}`);
});
