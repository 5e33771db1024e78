// OpenAI's client for JavaScript: an answer, streams, a call, an object of a schema, a response, and a refusal.
import { createRequire } from "node:module";

const [url, modules] = process.argv.slice(2);
const OpenAI = createRequire(`${modules}/`)("openai");
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const asked = [{ role: "user", content: "What should I eat in Borvik?" }];
const chat = { model: "tiny", messages: asked, max_completion_tokens: 40, temperature: 0 };

const whole = await client.chat.completions.create(chat);
const chunks = [];
let streamed = 0;
for await (const chunk of await client.chat.completions.create({
  ...chat, stream: true, stream_options: { include_usage: true },
})) {
  if (chunk.choices.length) chunks.push(chunk.choices[0].delta.content ?? "");
  streamed += chunk.usage?.completion_tokens ?? 0;
}
const helper = client.chat.completions.stream(chat);
const final = await helper.finalChatCompletion();
const parameters = { type: "object", properties: { amount: { type: "integer", maximum: 999 } }, required: ["amount"],
  additionalProperties: false };
const called = await client.chat.completions.create({
  ...chat, max_completion_tokens: 80, tool_choice: "required", parallel_tool_calls: false,
  tools: [{ type: "function", function: { name: "convert_money", parameters } }],
});
const schema = {
  type: "object", required: ["city"], additionalProperties: false, properties: { city: { enum: ["Borvik"] } },
};
const shaped = await client.chat.completions.parse({
  ...chat, response_format: { type: "json_schema", json_schema: { name: "trip", schema, strict: true } },
});
const response = await client.responses.create({
  model: "tiny", input: asked[0].content, max_output_tokens: 40, temperature: 0, store: true,
});
let refused = {};
try {
  await client.responses.create({ model: "tiny", input: "x", max_output_tokens: 0 });
} catch (error) {
  refused = { status: error.status, param: error.param };
}
console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  tokens: whole.usage.completion_tokens,
  reason: whole.choices[0].finish_reason,
  chunks, streamed,
  final: final.choices[0].message.content,
  calls: called.choices[0].message.tool_calls.map((call) => call.function),
  trip: JSON.parse(shaped.choices[0].message.content),
  response: response.output_text,
  status: response.status,
  refused,
}));
