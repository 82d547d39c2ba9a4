// The engines of `/admin/v1/analytics`: one, or one for each of several models.

// Return the engines, each with its restarts, and with the model's name if there are several.
export function enginesOf(data) {
  if (!data) return [];
  return data.models ?? [{ ...data.engine, restarts: data.restarts }];
}

// Return the sum of a number over the engines.
export function sumOf(engines, name) {
  return engines.reduce((sum, one) => sum + (one[name] ?? 0), 0);
}
